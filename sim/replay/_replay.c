/* Replay: the event simulation of sim.lanes and sim.fluid for a recorded schedule.
 *
 * It takes the same decisions in the same order as SimPy's queue does: events by time, then
 * urgency, then the order in which they were scheduled; callbacks of an event in the order in which
 * they were added. So it gives the same times up to rounding.
 */

#include "_replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ADVANCE_LANE, ARRIVE, RESUME }; /* what the end of a job sets off */

static const double ended_share = 1e-9; /* as in sim.fluid */

static Job *job_of(const Run *run, int32_t number) {
    return &run->jobs[number & (run->capacity - 1)];
}

/* Return a job that is not over, or NULL. */
static Job *unfinished(const Run *run, int32_t number) {
    if (number < run->oldest) return NULL;
    Job *job = job_of(run, number);
    return job->processed ? NULL : job;
}

/* ---- events -------------------------------------------------------------------------------- */

static void set_timer(Run *run, int32_t timer, double delay) {
    double when = run->now + delay;
    run->when[timer] = when;
    run->order[timer] = run->scheduled++;
    run->is_crowded |= when <= run->now;
}

static void is_done(Run *run, int32_t number) {
    Job *job = job_of(run, number);
    job->over = 1;
    run->ends[number & (run->num_ends - 1)] = run->now;
    int32_t place = (run->done_first + run->num_done++) & (run->capacity - 1);
    run->done[place] = (Done){run->scheduled++, number};
}

static void call_back(Run *run, Job *job, int32_t type, int32_t argument) {
    if (run->free_callback < 0) {
        int32_t room = 2 * run->callback_room;
        Callback *grown = realloc(run->callbacks, (size_t)room * sizeof(Callback));
        if (!grown) {
            run->failed = 1;
            return;
        }
        run->callbacks = grown;
        for (int32_t at = run->callback_room; at < room; at++) {
            grown[at].next = run->free_callback;
            run->free_callback = at;
        }
        run->callback_room = room;
    }
    int32_t at = run->free_callback;
    Callback *own = &run->callbacks[at];
    run->free_callback = own->next;
    *own = (Callback){argument, -1, type};
    if (job->first < 0)
        job->first = at;
    else
        run->callbacks[job->last].next = at;
    job->last = at;
}

/* ---- flows --------------------------------------------------------------------------------- */

static void move(Run *run) {
    double elapsed = run->now - run->since;
    run->since = run->now;
    if (elapsed <= 0) return;
    for (int32_t lane = 0; lane < LANES; lane++) {
        double left = run->left[lane] - run->rate[lane] * elapsed;
        run->left[lane] = left > 0 ? left : 0;
    }
}

/* Weighted max-min fair rates of the flows under way: see sim.fluid.fair_rates. */
static void find_rates(const Run *run, Mix *mix) {
    const Machine *machine = run->machine;
    double free_[RESOURCES];
    Kind kinds[LANES];
    int growing[LANES], count = run->num_flows;
    memcpy(free_, machine->capacity, sizeof free_);
    for (int f = 0; f < count; f++) {
        Kind *kind = &kinds[f];
        *kind = machine->kinds[run->flows[f]];
        growing[f] = f;
        if (run->flows[f] == HOST && run->host_most < kind->most) {
            double slower = kind->most / run->host_most;
            kind->most = run->host_most;
            if (run->tape->is_cpu) { /* a byte takes more of the cores' time */
                for (int r = 0; r < RESOURCES; r++) kind->uses[r] *= slower;
                kind->weight /= slower;
            }
        }
    }
    while (count) {
        double full[RESOURCES], level = INFINITY;
        for (int r = 0; r < RESOURCES; r++) {
            double load = 0;
            for (int g = 0; g < count; g++)
                load += kinds[growing[g]].uses[r] * kinds[growing[g]].weight;
            full[r] = load > 0 ? fmax(0, free_[r]) / load : INFINITY;
            level = fmin(level, full[r]);
        }
        for (int g = 0; g < count; g++)
            level = fmin(level, kinds[growing[g]].most / kinds[growing[g]].weight);
        int kept = 0;
        for (int g = 0; g < count; g++) {
            const Kind *kind = &kinds[growing[g]];
            int stops = kind->most / kind->weight <= level;
            for (int r = 0; r < RESOURCES && !stops; r++)
                stops = kind->uses[r] > 0 && full[r] <= level;
            if (!stops) {
                growing[kept++] = growing[g];
                continue;
            }
            double rate = level * kind->weight;
            mix->rate[run->flows[growing[g]]] = rate;
            mix->each[run->flows[growing[g]]] = 1 / rate;
            for (int r = 0; r < RESOURCES; r++) free_[r] -= rate * kind->uses[r];
        }
        count = kept;
    }
}

static void share_out(Run *run) {
    run->when[WAKE] = INFINITY;
    if (!run->num_flows) return;
    Mix *mix = &run->machine->mixes[run->mix];
    if (!mix->is_known || ((run->mix & 1 << HOST) && mix->most != run->host_most)) {
        for (int32_t lane = 0; lane < LANES; lane++) mix->rate[lane] = 0, mix->each[lane] = 1;
        find_rates(run, mix);
        mix->is_known = 1;
        mix->most = run->host_most;
    }
    double soonest = INFINITY;
    for (int32_t lane = 0; lane < LANES; lane++) { /* lanes without a flow have endless ones */
        double left = run->left[lane] * mix->each[lane];
        run->rate[lane] = mix->rate[lane];
        run->ending = left < soonest ? lane : run->ending;
        soonest = left < soonest ? left : soonest;
    }
    set_timer(run, WAKE, soonest);
}

static void send(Run *run, int32_t lane, const Job *job) {
    if (lane == HOST) {
        const Rates *rates = &run->machine->rates;
        double bytes = run->tape->bytes[job->recorded], steps = run->tape->steps[job->recorded];
        run->host_most = rates->host;
        if (steps * rates->host > bytes * rates->steps)
            run->host_most = rates->steps * bytes / steps;
    }
    if (!run->is_ending) move(run);
    run->flows[run->num_flows++] = lane;
    run->mix |= 1 << lane;
    run->left[lane] = run->size[lane] = job->remaining;
    if (!run->is_ending) share_out(run);
}

/* Return the bytes that a lane's flow had left. */
static double end_flow(Run *run, int32_t lane) {
    double left = run->left[lane];
    run->mix &= ~(1 << lane);
    run->left[lane] = INFINITY;
    run->rate[lane] = 0;
    return left;
}

/* Take the host's flow off; return the bytes that it had left. */
static double stop(Run *run) {
    int32_t place = 0;
    while (run->flows[place] != HOST) place++;
    move(run);
    double left = end_flow(run, HOST);
    run->num_flows--;
    for (; place < run->num_flows; place++) run->flows[place] = run->flows[place + 1];
    share_out(run);
    return left;
}

/* ---- lanes --------------------------------------------------------------------------------- */

static void advance(Run *run, int32_t lane);

static void record(Run *run, int32_t lane, const Job *job) {
    int32_t work = run->tape->work[job->recorded];
    double seconds = run->now - run->started[lane];
    run->busy[work] += seconds;
    if (job->step <= run->mark) run->earlier[work] += seconds;
}

static void finish(Run *run, int32_t lane) {
    int32_t number = run->running[lane];
    run->running[lane] = -1;
    record(run, lane, job_of(run, number));
    is_done(run, number);
    advance(run, lane);
}

static void begin_flow(Run *run, int32_t lane) {
    Job *job = job_of(run, run->running[lane]);
    if (job->remaining <= 0)
        finish(run, lane);
    else
        send(run, lane, job);
}

static void start(Run *run, int32_t lane, int32_t number) {
    Job *job = job_of(run, number);
    double seconds = run->machine->sums[run->tape->seconds[job->recorded]];
    run->running[lane] = number;
    run->started[lane] = run->now;
    int32_t is_flow = lane != DEVICE || run->tape->is_cpu;
    if (!job->begun && (!is_flow || (lane != DEVICE && seconds > 0))) {
        job->begun = 1;
        set_timer(run, lane, seconds);
    } else {
        begin_flow(run, lane);
    }
}

static int is_more_urgent(const Ready *a, const Ready *b) {
    return a->urgency < b->urgency || (a->urgency == b->urgency && a->job < b->job);
}

static void push(Run *run, int32_t number) {
    const Job *job = job_of(run, number);
    /* By deadline, then by step, then by rank: a segment's, below 0. */
    int64_t urgency = ((int64_t)job->deadline << 40) + ((int64_t)job->step << 20);
    Ready own = {urgency + run->tape->rank[job->recorded], number};
    int32_t mask = run->capacity - 1, place = run->ready_first + run->num_ready++;
    for (; place > run->ready_first; place--) { /* most come behind all others */
        const Ready *before = &run->ready[(place - 1) & mask];
        if (!is_more_urgent(&own, before)) break;
        run->ready[place & mask] = *before;
    }
    run->ready[place & mask] = own;
}

static int32_t take_ready(Run *run) {
    int32_t number = run->ready[run->ready_first].job;
    run->ready_first = (run->ready_first + 1) & (run->capacity - 1);
    run->num_ready--;
    return number;
}

static void advance(Run *run, int32_t lane) {
    const Tape *tape = run->tape;
    if (run->running[lane] >= 0) return;
    if (lane == HOST) {
        if (run->num_ready) start(run, HOST, take_ready(run));
        return;
    }
    int32_t number = run->head[lane];
    if (number < 0) return;
    Job *job = job_of(run, number);
    const int32_t *after = tape->after + tape->after_at[job->recorded];
    while (job->left > 0) {
        Job *before = unfinished(run, number - after[job->left - 1]);
        if (before) {
            call_back(run, before, ADVANCE_LANE, lane);
            return;
        }
        job->left--;
    }
    run->head[lane] = job->next;
    start(run, lane, number);
}

static void make_ready(Run *run, int32_t number) {
    push(run, number);
    int32_t running = run->running[HOST];
    if (running < 0) {
        advance(run, HOST);
        return;
    }
    Job *job = job_of(run, running);
    if (!(run->mix & 1 << HOST) || job_of(run, number)->deadline >= job->deadline) return;
    run->running[HOST] = -1;
    job->remaining = stop(run);
    record(run, HOST, job);
    if (job->remaining > 0)
        push(run, running);
    else /* its end was due now */
        is_done(run, running);
    advance(run, HOST);
}

/* Make room for another job. */
static void make_room(Run *run) {
    while (run->oldest < run->num_jobs && job_of(run, run->oldest)->processed) run->oldest++;
    int32_t capacity = run->capacity, live = run->num_jobs - run->oldest;
    if (live < capacity) return;
    Job *jobs = malloc(2 * (size_t)capacity * sizeof(Job));
    Done *done = malloc(2 * (size_t)capacity * sizeof(Done));
    Ready *ready = malloc(2 * (size_t)capacity * sizeof(Ready));
    if (!jobs || !done || !ready) {
        free(jobs);
        free(done);
        free(ready);
        run->failed = 1;
        return;
    }
    for (int32_t number = run->oldest; number < run->num_jobs; number++)
        jobs[number & (2 * capacity - 1)] = *job_of(run, number);
    for (int32_t at = 0; at < run->num_done; at++)
        done[at] = run->done[(run->done_first + at) & (capacity - 1)];
    for (int32_t at = 0; at < run->num_ready; at++)
        ready[at] = run->ready[(run->ready_first + at) & (capacity - 1)];
    free(run->jobs);
    free(run->done);
    free(run->ready);
    run->jobs = jobs;
    run->done = done;
    run->ready = ready;
    run->done_first = run->ready_first = 0;
    run->capacity = 2 * capacity;
}

static void submit(Run *run, int32_t recorded) {
    const Tape *tape = run->tape;
    if (run->num_jobs - run->oldest == run->capacity) make_room(run);
    if (run->failed) return;
    int32_t number = run->num_jobs++, lane = tape->lane[recorded];
    int32_t from = tape->after_at[recorded], to = tape->after_at[recorded + 1];
    Job *job = job_of(run, number);
    *job = (Job){
        .remaining = tape->bytes[recorded], .recorded = recorded,
        .step = tape->step[recorded] + run->step, .deadline = tape->deadline[recorded] + run->step,
        .next = -1, .first = -1, .last = -1,
    };
    if (lane == HOST) {
        for (int32_t at = from; at < to; at++) {
            Job *before = unfinished(run, number - tape->after[at]);
            if (!before) continue;
            job->left++;
            call_back(run, before, ARRIVE, number);
        }
        if (!job->left) make_ready(run, number);
        return;
    }
    if (lane == DEVICE && tape->is_cpu)
        job->remaining = run->machine->sums[tape->seconds[recorded]];
    job->left = to - from;
    if (run->head[lane] < 0) {
        run->head[lane] = run->tail[lane] = number;
        advance(run, lane);
    } else {
        job_of(run, run->tail[lane])->next = number;
        run->tail[lane] = number;
    }
}

/* ---- the schedule -------------------------------------------------------------------------- */

static void submit_up_to(Run *run, int32_t count) {
    int32_t first = run->tape->job_at[run->recorded];
    while (run->num_submitted < count && !run->failed) submit(run, first + run->num_submitted++);
}

static void go_on(Run *run) {
    const Tape *tape = run->tape;
    int32_t from = tape->operation_at[run->recorded], to = tape->operation_at[run->recorded + 1];
    for (; run->operation < to; run->operation++) {
        submit_up_to(run, tape->submitted[run->operation]);
        if (run->failed) return;
        int32_t distance = tape->awaited[run->operation];
        if (!distance) {
            set_timer(run, SLEPT, run->machine->sums[tape->sleep[run->operation]]);
            return;
        }
        Job *job = unfinished(run, run->num_jobs - distance);
        if (job) {
            call_back(run, job, RESUME, 0);
            return;
        }
        run->operation_end[run->operation - from] = run->now;
    }
    submit_up_to(run, tape->job_at[run->recorded + 1] - tape->job_at[run->recorded]);
    run->is_over = 1;
}

static void resume(Run *run) {
    run->operation_end[run->operation - run->tape->operation_at[run->recorded]] = run->now;
    run->operation++;
    go_on(run);
}

static void wake_up(Run *run) {
    move(run);
    int32_t ended[LANES], count = 0, still = 0;
    for (int32_t f = 0; f < run->num_flows; f++) {
        int32_t lane = run->flows[f];
        if (lane == run->ending || run->left[lane] <= ended_share * run->size[lane]) {
            ended[count++] = lane;
            end_flow(run, lane);
        } else {
            run->flows[still++] = lane;
        }
    }
    run->num_flows = still;
    run->is_ending = 1;
    for (int32_t f = 0; f < count; f++) finish(run, ended[f]);
    run->is_ending = 0;
    share_out(run);
}

/* Let what the present event sets off happen, until a step is over. */
static void set_off(Run *run) {
    while (run->chain >= 0 && !run->is_over && !run->failed) {
        Callback *at = &run->callbacks[run->chain], own = *at;
        at->next = run->free_callback;
        run->free_callback = run->chain;
        run->chain = own.next;
        if (own.type == ADVANCE_LANE)
            advance(run, own.argument);
        else if (own.type == RESUME)
            resume(run);
        else if (--job_of(run, own.argument)->left == 0)
            make_ready(run, own.argument);
    }
}

/* Return the timer that goes off first; of several the one that was set first. */
static int32_t first_timer(Run *run) {
    int32_t first = 0, are_several = 0;
    double soonest = run->when[0];
    for (int32_t timer = 1; timer < TIMERS; timer++) { /* no branch: none is usual */
        double when = run->when[timer];
        are_several = when < soonest ? 0 : are_several | (when == soonest);
        first = when < soonest ? timer : first;
        soonest = when < soonest ? when : soonest;
    }
    run->is_crowded = are_several;
    if (are_several)
        for (int32_t timer = first + 1; timer < TIMERS; timer++)
            if (run->when[timer] == soonest && run->order[timer] < run->order[first])
                first = timer;
    return first;
}

/* Let a timer go off; return whether it is set. */
static int go_off(Run *run, int32_t timer) {
    if (run->when[timer] == INFINITY) return 0;
    run->now = run->when[timer];
    run->when[timer] = INFINITY;
    if (timer == WAKE)
        wake_up(run);
    else if (timer == SLEPT)
        resume(run);
    else
        begin_flow(run, timer);
    return 1;
}

/* Let the next event happen; return whether there is any. */
static int happen(Run *run) {
    if (!run->num_done) return go_off(run, first_timer(run));
    const Done *done = &run->done[run->done_first];
    if (run->is_crowded) { /* a timer may go off now, too */
        int32_t timer = first_timer(run);
        run->is_crowded = run->when[timer] <= run->now;
        if (run->is_crowded && run->order[timer] < done->order) return go_off(run, timer);
    }
    Job *job = job_of(run, done->job);
    job->processed = 1;
    run->chain = job->first;
    run->done_first = (run->done_first + 1) & (run->capacity - 1);
    run->num_done--;
    set_off(run);
    return 1;
}

int take_step(Run *run, int32_t recorded) {
    run->step++;
    run->recorded = recorded;
    run->first_job = run->num_jobs;
    run->num_submitted = run->is_over = 0;
    run->operation = run->tape->operation_at[recorded];
    go_on(run);
    set_off(run);
    while (!run->is_over && !run->failed)
        if (!happen(run)) run->failed = 1; /* it waits for ever */
    return run->failed;
}

/* Return when a job ended; 0 if it is some steps old. */
static double end_of(const Run *run, int32_t number) {
    return number < run->num_jobs - run->num_ends ? 0 : run->ends[number & (run->num_ends - 1)];
}

double stalled(const Run *run) {
    const Tape *tape = run->tape;
    int32_t step = run->recorded, begun = tape->stall_begin[step];
    double stall = run->now - run->operation_end[begun];
    for (int32_t gap = tape->gap_at[step]; gap < tape->gap_at[step + 1]; gap++) {
        double from = end_of(run, run->first_job + tape->passed[gap]), over = from;
        for (int32_t at = tape->room_at[gap]; at < tape->room_at[gap + 1]; at++) {
            double end = end_of(run, run->first_job + tape->room[at]);
            over = end > over ? end : over;
        }
        stall += over - from;
    }
    return stall;
}

void drain(Run *run) {
    run->is_over = 0;
    set_off(run);
    while (!run->failed && happen(run)) continue;
}
