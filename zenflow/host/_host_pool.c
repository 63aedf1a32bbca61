/* Threads that run the host's jobs without the interpreter.
 *
 * Loaded by zenflow/host/pool.py with ctypes. A caller hands over some jobs, each the rows of one
 * block, and works on them itself. Where they are more than a piece, the pool's threads help: they
 * take pieces from the oldest call first, so that two callers keep all threads at work while one
 * of them prepares its next call. The arithmetic is that of _host_kernel.c, whose cut into calls
 * changes no bit.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "_host_kernel.h"

/* What a job does with its rows. */
enum { ACCUMULATE = 0, MOMENTS = 1, ADAMW = 2 };

/* Rows whose scales are computed at once, on the stack. */
#define CHUNK 256

/* One block's work; pool.py declares the same fields. A pointer that a kind does not need is
 * null. */
typedef struct {
    int32_t kind;
    int32_t grad_dtype;
    int32_t out_dtype;
    int32_t is_first; /* ACCUMULATE: whether the gradient opens its window */
    int64_t rows;
    int64_t cols;
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    float *acc;
    void *grad;
    void *out;
    int64_t *step; /* Adam steps taken by each row; counted up where a gradient comes in */
    const uint8_t *active;
    double lr;
    double beta1;
    double beta2;
    float eps;
    float decay;
    float prediction;
    float count;
} HostJob;

/* Adds this many elements to a pointer that may be null. */
#define AT(pointer, offset) ((pointer) ? (pointer) + (offset) : NULL)

static void *bytes_at(void *pointer, int64_t offset, int dtype)
{
    return AT((char *)pointer, offset * (dtype == 0 ? 4 : 2));
}

/* step_size = lr / (1 - beta1^t) and denom_scale = sqrt(1 - beta2^t) of each row, in double until
 * the end, as torch computes them in Python's floats. Neighbours mostly share t. */
static void row_scales(const HostJob *job, const int64_t *step, int64_t rows, float *step_size,
                       float *denom_scale)
{
    for (int64_t row = 0; row < rows; row++) {
        if (row && step[row] == step[row - 1]) {
            step_size[row] = step_size[row - 1];
            denom_scale[row] = denom_scale[row - 1];
            continue;
        }
        const double t = (double)step[row];
        step_size[row] = (float)(job->lr / (1.0 - pow(job->beta1, t)));
        denom_scale[row] = (float)sqrt(1.0 - pow(job->beta2, t));
    }
}

static void run_adamw(const HostJob *job, int64_t low, int64_t high, float factor)
{
    float step_size[CHUNK], denom_scale[CHUNK];
    for (int64_t row = low; row < high; row += CHUNK) {
        const int64_t rows = high - row < CHUNK ? high - row : CHUNK;
        const int64_t first = row * job->cols;
        int64_t *step = job->step + row;
        if (job->grad || job->acc)
            for (int64_t i = 0; i < rows; i++)
                step[i] += job->active[row + i];
        row_scales(job, step, rows, step_size, denom_scale);
        zenflow_adamw(job->master + first, job->exp_avg + first, job->exp_avg_sq + first,
                      bytes_at(job->out, first, job->out_dtype), job->out_dtype,
                      bytes_at(job->grad, first, job->grad_dtype), job->grad_dtype, factor,
                      AT(job->acc, first), job->count, rows, job->cols, step_size, denom_scale,
                      job->active + row, (float)job->beta2, (float)(1.0 - job->beta1),
                      (float)(1.0 - job->beta2), job->eps, job->decay, job->prediction);
    }
}

static void run_rows(const HostJob *job, int64_t low, int64_t high, float factor)
{
    const int64_t first = low * job->cols, size = (high - low) * job->cols;
    void *grad = bytes_at(job->grad, first, job->grad_dtype);
    if (job->kind == ACCUMULATE) {
        zenflow_accumulate(job->acc + first, grad, job->grad_dtype, size, factor, job->is_first);
    } else if (job->kind == MOMENTS) {
        for (int64_t row = low; row < high; row++)
            job->step[row]++;
        zenflow_moments(job->exp_avg + first, job->exp_avg_sq + first, grad, job->grad_dtype, size,
                        factor, (float)job->beta2, (float)(1.0 - job->beta1),
                        (float)(1.0 - job->beta2));
    } else {
        run_adamw(job, low, high, factor);
    }
}

#if !defined(_WIN32)
#include <pthread.h>

/* One call: jobs[job] is cut next, from `row` on. It lives on its caller's stack. */
typedef struct Call {
    const HostJob *jobs;
    int64_t num_jobs;
    int64_t piece_elements;
    float factor;
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
    run_rows(job, low, high, call->factor);
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
EXPORT void zenflow_pool_run(void *opened, const HostJob *jobs, int64_t num_jobs, float factor,
                             int64_t piece_elements)
{
    Pool *pool = opened;
    Call call = {jobs, num_jobs, piece_elements, factor, 0, 0, 0, NULL};
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

EXPORT void zenflow_pool_run(void *opened, const HostJob *jobs, int64_t num_jobs, float factor,
                             int64_t piece_elements)
{
    (void)opened;
    (void)piece_elements;
    for (int64_t i = 0; i < num_jobs; i++)
        run_rows(&jobs[i], 0, jobs[i].rows, factor);
}

EXPORT void zenflow_pool_close(void *opened)
{
    (void)opened;
}
#endif
