/* Threads that run the host's jobs without the interpreter.
 *
 * Loaded by zenflow/host/pool.py with ctypes. A caller hands over some jobs, each the rows of one
 * block, and works on them itself. Where they are more than a piece, the pool's threads help: they
 * take pieces from the oldest call first, so that two callers keep all threads at work while one
 * of them prepares its next call. The arithmetic is that of kernel.c, whose cut into calls
 * changes no bit.
 */
#include <stdint.h>
#include <stdlib.h>

#include "kernel.h"

#if !defined(_WIN32)
#include <pthread.h>

/* One call: jobs[job] is cut next, from `row` on. It lives on its caller's stack. */
typedef struct Call {
    const HostJob *jobs;
    int64_t num_jobs;
    int64_t piece_elements;
    int64_t job;
    int64_t row;
    int64_t num_running; /* pieces that threads are at work on */
    struct Call *next;
} Call;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* there is something to take, or the pool closes */
    pthread_cond_t done; /* a call has ended */
    Call *oldest;        /* calls with rows to take */
    int is_closing;
    int num_threads;
    pthread_t threads[];
} Pool;

static void forget(Pool *pool, Call *call)
{
    Call **link = &pool->oldest;
    while (*link != call)
        link = &(*link)->next;
    *link = call->next;
}

/* Takes the next piece of a call and runs it; call with the lock held. */
static void run_piece(Pool *pool, Call *call)
{
    const HostJob *job = &call->jobs[call->job];
    int64_t most = job->cols ? call->piece_elements / job->cols : job->rows;
    const int64_t low = call->row;
    const int64_t high = job->rows - low > (most < 1 ? 1 : most) ? low + (most < 1 ? 1 : most)
                                                                 : job->rows;
    call->row = high;
    if (high == job->rows) {
        call->row = 0;
        if (++call->job == call->num_jobs)
            forget(pool, call);
    }
    call->num_running++;
    pthread_mutex_unlock(&pool->lock);
    zenflow_run(job, low, high);
    pthread_mutex_lock(&pool->lock);
    if (--call->num_running == 0 && call->job == call->num_jobs)
        pthread_cond_broadcast(&pool->done);
}

static void *loop(void *argument)
{
    Pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    while (pool->oldest || !pool->is_closing) {
        if (pool->oldest)
            run_piece(pool, pool->oldest);
        else
            pthread_cond_wait(&pool->work, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

EXPORT void zenflow_pool_close(void *opened)
{
    Pool *pool = opened;
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Returns null where the system gives no more threads. */
EXPORT void *zenflow_pool_open(int num_threads)
{
    Pool *pool = calloc(1, sizeof *pool + (size_t)num_threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (; pool->num_threads < num_threads; pool->num_threads++) {
        if (pthread_create(&pool->threads[pool->num_threads], NULL, loop, pool) != 0) {
            zenflow_pool_close(pool);
            return NULL;
        }
    }
    return pool;
}

static int is_shared(const HostJob *jobs, int64_t num_jobs, int64_t piece_elements)
{
    int64_t elements = 0;
    for (int64_t i = 0; i < num_jobs; i++)
        elements += jobs[i].rows * jobs[i].cols;
    return elements > piece_elements;
}

/* Returns when all rows of all jobs are done. */
EXPORT void zenflow_pool_run(void *opened, const HostJob *jobs, int64_t num_jobs,
                             int64_t piece_elements)
{
    Pool *pool = opened;
    Call call = {jobs, num_jobs, piece_elements, 0, 0, 0, NULL};
    if (num_jobs == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    Call **last = &pool->oldest;
    while (*last)
        last = &(*last)->next;
    *last = &call;
    if (is_shared(jobs, num_jobs, piece_elements))
        pthread_cond_broadcast(&pool->work); /* waking a thread takes longer than a small piece */
    while (call.job < call.num_jobs)
        run_piece(pool, &call);
    while (call.num_running)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

#else /* No POSIX threads: the caller does the work. */
static char only;

EXPORT void *zenflow_pool_open(int num_threads)
{
    (void)num_threads;
    return &only;
}

EXPORT void zenflow_pool_run(void *opened, const HostJob *jobs, int64_t num_jobs,
                             int64_t piece_elements)
{
    (void)opened;
    (void)piece_elements;
    for (int64_t i = 0; i < num_jobs; i++)
        zenflow_run(&jobs[i], 0, jobs[i].rows);
}

EXPORT void zenflow_pool_close(void *opened)
{
    (void)opened;
}
#endif
