/* Replay: the event simulation of sim.lanes and sim.fluid for a recorded schedule, on many
 * machines.
 *
 * It takes the same decisions in the same order as SimPy's queue does: events by time, then
 * urgency, then the order in which they were scheduled; callbacks of an event in the order in which
 * they were added. So it gives the same times up to rounding.
 */

#include "_replay.h"

#include <math.h>
#include <stdlib.h>

enum { DEVICE, D2H, H2D, HOST, LANES };
enum { DOWN, UP, BOTH, DRAM, RESOURCES };
enum { ALARM, WAKE, DONE, SLEPT };           /* what happens */
enum { ADVANCE_LANE, ARRIVE, RESUME };       /* what an event sets off */
enum { WAIT, SLEEP };                        /* what the schedule does beside submitting jobs */

static const double ended_share = 1e-9; /* as in sim.fluid */

typedef struct {
    double time;
    int64_t order;
    int32_t type, argument;
} Event;

typedef struct {
    int32_t type, argument, next;
} Callback;

typedef struct {
    double rate, remaining, num_bytes, most;
    int32_t lane;
} Flow;

typedef struct {
    const Tape *tape;
    const double *rates, *seconds, *sleeps;
    double now;
    /* events */
    Event *queue;
    int64_t queued, queue_room, scheduled;
    Callback *callbacks;
    int64_t num_callbacks, callback_room;
    int failed;
    /* jobs */
    int32_t *first, *last, *next, *left;
    double *remaining, *end;
    char *processed, *begun;
    int32_t num_submitted;
    /* lanes */
    int32_t head[LANES], tail[LANES], running[LANES];
    double started[LANES], busy[LANES];
    int32_t *ready, num_ready;
    /* flows, in the order in which they began */
    Flow flows[LANES];
    int32_t num_flows, ending, is_ending;
    int64_t wake;
    double since;
    /* the schedule */
    int32_t operation;
    double *operation_end;
} Run;

/* ---- events -------------------------------------------------------------------------------- */

static int comes_before(const Event *a, const Event *b) {
    return a->time < b->time || (a->time == b->time && a->order < b->order);
}

static void schedule(Run *run, double delay, int32_t type, int32_t argument) {
    if (run->queued == run->queue_room) {
        int64_t room = 2 * run->queue_room + 64;
        Event *grown = realloc(run->queue, (size_t)room * sizeof(Event));
        if (!grown) {
            run->failed = 1;
            return;
        }
        run->queue = grown;
        run->queue_room = room;
    }
    Event event = {run->now + delay, run->scheduled++, type, argument};
    int64_t place = run->queued++;
    while (place > 0) {
        int64_t parent = (place - 1) / 2;
        if (!comes_before(&event, &run->queue[parent])) break;
        run->queue[place] = run->queue[parent];
        place = parent;
    }
    run->queue[place] = event;
}

static Event pop(Run *run) {
    Event first = run->queue[0], moved = run->queue[--run->queued];
    int64_t place = 0, count = run->queued;
    for (;;) {
        int64_t child = 2 * place + 1;
        if (child >= count) break;
        if (child + 1 < count && comes_before(&run->queue[child + 1], &run->queue[child])) child++;
        if (!comes_before(&run->queue[child], &moved)) break;
        run->queue[place] = run->queue[child];
        place = child;
    }
    if (count) run->queue[place] = moved;
    return first;
}

static void call_back(Run *run, int32_t job, int32_t type, int32_t argument) {
    if (run->num_callbacks == run->callback_room) {
        int64_t room = 2 * run->callback_room + 256;
        Callback *grown = realloc(run->callbacks, (size_t)room * sizeof(Callback));
        if (!grown) {
            run->failed = 1;
            return;
        }
        run->callbacks = grown;
        run->callback_room = room;
    }
    int32_t index = (int32_t)run->num_callbacks++;
    run->callbacks[index] = (Callback){type, argument, -1};
    if (run->first[job] < 0)
        run->first[job] = index;
    else
        run->callbacks[run->last[job]].next = index;
    run->last[job] = index;
}

/* ---- flows --------------------------------------------------------------------------------- */

static void move(Run *run) {
    double elapsed = run->now - run->since;
    run->since = run->now;
    if (elapsed <= 0) return;
    for (int f = 0; f < run->num_flows; f++) {
        double left = run->flows[f].remaining - run->flows[f].rate * elapsed;
        run->flows[f].remaining = left > 0 ? left : 0;
    }
}

static double use(const Run *run, const Flow *flow, int resource) {
    if (resource == DRAM)
        return run->rates[flow->lane == HOST ? RATE_HOST_SHARING : RATE_SHARING];
    if (flow->lane == HOST) return 0;
    return resource == BOTH || resource == (flow->lane == D2H ? DOWN : UP);
}

/* Weighted max-min fair rates, all weights being 1: see sim.fluid.fair_rates. */
static void share(Run *run) {
    double free_[RESOURCES] = {run->rates[RATE_D2H], run->rates[RATE_H2D], run->rates[RATE_DUPLEX],
                               run->rates[RATE_DRAM]};
    int growing[LANES], count = run->num_flows;
    for (int f = 0; f < count; f++) growing[f] = f;
    while (count) {
        double full[RESOURCES], level = INFINITY;
        for (int r = 0; r < RESOURCES; r++) {
            double load = 0;
            for (int g = 0; g < count; g++) load += use(run, &run->flows[growing[g]], r);
            full[r] = load > 0 ? fmax(0, free_[r]) / load : INFINITY;
            level = fmin(level, full[r]);
        }
        for (int g = 0; g < count; g++) level = fmin(level, run->flows[growing[g]].most);
        int kept = 0;
        for (int g = 0; g < count; g++) {
            Flow *flow = &run->flows[growing[g]];
            int stops = flow->most <= level;
            for (int r = 0; r < RESOURCES && !stops; r++)
                stops = use(run, flow, r) > 0 && full[r] <= level;
            if (!stops) {
                growing[kept++] = growing[g];
                continue;
            }
            flow->rate = level;
            for (int r = 0; r < RESOURCES; r++) free_[r] -= level * use(run, flow, r);
        }
        count = kept;
    }
}

static void share_out(Run *run) {
    run->wake++; /* those set before do nothing */
    if (!run->num_flows) return;
    share(run);
    double soonest = INFINITY;
    run->ending = run->flows[0].lane;
    for (int f = 0; f < run->num_flows; f++) {
        double left = run->flows[f].remaining / run->flows[f].rate;
        if (left < soonest) {
            soonest = left;
            run->ending = run->flows[f].lane;
        }
    }
    schedule(run, soonest, WAKE, (int32_t)run->wake);
}

static void send(Run *run, int32_t lane, int32_t job) {
    double most = INFINITY, bytes = run->remaining[job];
    if (lane == HOST) {
        double whole = run->tape->bytes[job], steps = run->tape->steps[job];
        most = run->rates[RATE_HOST];
        if (steps * most > whole * run->rates[RATE_STEPS])
            most = run->rates[RATE_STEPS] * whole / steps;
    }
    if (!run->is_ending) move(run);
    run->flows[run->num_flows++] = (Flow){0, bytes, bytes, most, lane};
    if (!run->is_ending) share_out(run);
}

/* Take the host's flow off; return the bytes that it had left. */
static double stop(Run *run) {
    int place = 0;
    while (run->flows[place].lane != HOST) place++;
    move(run);
    double left = run->flows[place].remaining;
    run->num_flows--;
    for (; place < run->num_flows; place++) run->flows[place] = run->flows[place + 1];
    share_out(run);
    return left;
}

static int host_flows(const Run *run) {
    for (int f = 0; f < run->num_flows; f++)
        if (run->flows[f].lane == HOST) return 1;
    return 0;
}

/* ---- lanes --------------------------------------------------------------------------------- */

static void advance(Run *run, int32_t lane);

static void record(Run *run, int32_t lane, int32_t job) {
    if (run->tape->step[job] > run->tape->settling)
        run->busy[lane] += run->now - run->started[lane];
}

static void finish(Run *run, int32_t lane) {
    int32_t job = run->running[lane];
    run->running[lane] = -1;
    record(run, lane, job);
    run->end[job] = run->now;
    if (run->tape->is_awaited[job]) schedule(run, 0, DONE, job);
    advance(run, lane);
}

static void begin_flow(Run *run, int32_t lane) {
    if (lane == DEVICE || run->remaining[run->running[lane]] <= 0)
        finish(run, lane);
    else
        send(run, lane, run->running[lane]);
}

static void start(Run *run, int32_t lane, int32_t job) {
    run->running[lane] = job;
    run->started[lane] = run->now;
    if (!run->begun[job] && (run->seconds[job] > 0 || lane == DEVICE)) {
        run->begun[job] = 1;
        schedule(run, run->seconds[job], ALARM, lane);
    } else {
        begin_flow(run, lane);
    }
}

static int more_urgent(const Tape *tape, int32_t a, int32_t b) {
    if (tape->deadline[a] != tape->deadline[b]) return tape->deadline[a] < tape->deadline[b];
    if (tape->step[a] != tape->step[b]) return tape->step[a] < tape->step[b];
    if (tape->rank[a] != tape->rank[b]) return tape->rank[a] < tape->rank[b];
    return a < b;
}

static void push(Run *run, int32_t job) {
    int32_t place = run->num_ready++; /* the most urgent one is last */
    while (place > 0 && more_urgent(run->tape, run->ready[place - 1], job)) {
        run->ready[place] = run->ready[place - 1];
        place--;
    }
    run->ready[place] = job;
}

static void advance(Run *run, int32_t lane) {
    const Tape *tape = run->tape;
    if (run->running[lane] >= 0) return;
    if (lane == HOST) {
        if (run->num_ready) start(run, HOST, run->ready[--run->num_ready]);
        return;
    }
    int32_t job = run->head[lane];
    if (job < 0) return;
    while (run->left[job] > 0) {
        int32_t other = tape->after[tape->after_at[job] + run->left[job] - 1];
        if (!run->processed[other]) {
            call_back(run, other, ADVANCE_LANE, lane);
            return;
        }
        run->left[job]--;
    }
    run->head[lane] = run->next[job];
    start(run, lane, job);
}

static void make_ready(Run *run, int32_t job) {
    push(run, job);
    int32_t running = run->running[HOST];
    if (running < 0) {
        advance(run, HOST);
    } else if (host_flows(run) && run->tape->deadline[job] < run->tape->deadline[running]) {
        run->running[HOST] = -1;
        run->remaining[running] = stop(run);
        record(run, HOST, running);
        if (run->remaining[running] > 0) {
            push(run, running);
        } else { /* its end was due now */
            run->end[running] = run->now;
            if (run->tape->is_awaited[running]) schedule(run, 0, DONE, running);
        }
        advance(run, HOST);
    }
}

static void submit(Run *run, int32_t job) {
    const Tape *tape = run->tape;
    int32_t lane = tape->lane[job];
    int64_t from = tape->after_at[job], to = tape->after_at[job + 1];
    run->remaining[job] = tape->bytes[job];
    if (lane == HOST) {
        run->left[job] = 0;
        for (int64_t at = from; at < to; at++) {
            if (run->processed[tape->after[at]]) continue;
            run->left[job]++;
            call_back(run, tape->after[at], ARRIVE, job);
        }
        if (!run->left[job]) make_ready(run, job);
        return;
    }
    run->left[job] = (int32_t)(to - from);
    run->next[job] = -1;
    if (run->head[lane] < 0) {
        run->head[lane] = run->tail[lane] = job;
        advance(run, lane);
    } else {
        run->next[run->tail[lane]] = job;
        run->tail[lane] = job;
    }
}

/* ---- the schedule -------------------------------------------------------------------------- */

static void go_on(Run *run) {
    const Tape *tape = run->tape;
    for (; run->operation < tape->num_operations; run->operation++) {
        while (run->num_submitted < tape->submitted[run->operation])
            submit(run, run->num_submitted++);
        int32_t job = tape->awaited[run->operation];
        if (job >= 0 && !run->processed[job]) {
            call_back(run, job, RESUME, 0);
            return;
        }
        if (job < 0) {
            schedule(run, run->sleeps[run->operation], SLEPT, 0);
            return;
        }
        run->operation_end[run->operation] = run->now;
    }
    while (run->num_submitted < tape->num_jobs) submit(run, run->num_submitted++);
}

static void resume(Run *run) {
    run->operation_end[run->operation++] = run->now;
    go_on(run);
}

static void wake_up(Run *run) {
    move(run);
    Flow ended[LANES];
    int count = 0, still = 0;
    for (int f = 0; f < run->num_flows; f++) {
        Flow *flow = &run->flows[f];
        if (flow->lane == run->ending || flow->remaining <= ended_share * flow->num_bytes)
            ended[count++] = *flow;
        else
            run->flows[still++] = *flow;
    }
    run->num_flows = still;
    run->is_ending = 1;
    for (int f = 0; f < count; f++) finish(run, ended[f].lane);
    run->is_ending = 0;
    share_out(run);
}

static void happen(Run *run, const Event *event) {
    if (event->type == ALARM) {
        begin_flow(run, event->argument);
    } else if (event->type == WAKE) {
        if (event->argument == (int32_t)run->wake) wake_up(run);
    } else if (event->type == SLEPT) {
        resume(run);
    } else {
        int32_t job = event->argument;
        run->processed[job] = 1;
        for (int32_t at = run->first[job]; at >= 0 && !run->failed; at = run->callbacks[at].next) {
            Callback callback = run->callbacks[at];
            if (callback.type == ADVANCE_LANE)
                advance(run, callback.argument);
            else if (callback.type == RESUME)
                resume(run);
            else if (--run->left[callback.argument] == 0)
                make_ready(run, callback.argument);
        }
    }
}

static void reset(Run *run) {
    int32_t count = run->tape->num_jobs;
    run->now = run->since = 0;
    run->queued = run->scheduled = run->num_callbacks = 0;
    run->num_submitted = run->num_ready = run->num_flows = 0;
    run->is_ending = run->operation = 0;
    run->wake = 0;
    for (int lane = 0; lane < LANES; lane++) {
        run->head[lane] = run->tail[lane] = run->running[lane] = -1;
        run->busy[lane] = 0;
    }
    for (int32_t job = 0; job < count; job++) {
        run->first[job] = run->last[job] = -1;
        run->processed[job] = run->begun[job] = 0;
    }
}

/* Ends of steps, and seconds of each in which the device waited: some of them within backward. */
static void summarise(const Run *run, double *ends, double *stalls) {
    const Tape *tape = run->tape;
    for (int32_t step = 0; step < tape->num_steps; step++) {
        double end = run->operation_end[tape->step_end[step]];
        double stall = end - run->operation_end[tape->stall_begin[step]];
        for (int32_t gap = tape->gap_at[step]; gap < tape->gap_at[step + 1]; gap++) {
            double over = run->end[tape->passed[gap]];
            for (int64_t at = tape->room_at[gap]; at < tape->room_at[gap + 1]; at++)
                over = fmax(over, run->end[tape->room[at]]);
            stall += over - run->end[tape->passed[gap]];
        }
        ends[step] = end;
        stalls[step] = stall;
    }
}

int32_t sim_replay_interface(void) { return 2; }

int32_t sim_replay(const Tape *tape, const double *rates, const double *seconds,
                   const double *sleeps, int64_t are_own, int64_t count, double *ends,
                   double *stalls, double *busy) {
    size_t jobs = (size_t)tape->num_jobs + 1;
    Run run = {.tape = tape};
    run.first = malloc(jobs * sizeof(int32_t));
    run.last = malloc(jobs * sizeof(int32_t));
    run.next = malloc(jobs * sizeof(int32_t));
    run.left = malloc(jobs * sizeof(int32_t));
    run.ready = malloc(jobs * sizeof(int32_t));
    run.remaining = malloc(jobs * sizeof(double));
    run.end = malloc(jobs * sizeof(double));
    run.processed = malloc(jobs);
    run.begun = malloc(jobs);
    run.operation_end = malloc(((size_t)tape->num_operations + 1) * sizeof(double));
    run.failed = !(run.first && run.last && run.next && run.left && run.ready && run.remaining &&
                   run.end && run.processed && run.begun && run.operation_end);
    for (int64_t machine = 0; machine < count && !run.failed; machine++) {
        int64_t own = are_own ? machine : 0;
        run.rates = rates + machine * NUM_RATES;
        run.seconds = seconds + own * tape->num_jobs;
        run.sleeps = sleeps + own * tape->num_operations;
        reset(&run);
        go_on(&run);
        while (run.queued && !run.failed) {
            Event event = pop(&run);
            run.now = event.time;
            happen(&run, &event);
        }
        if (run.failed) break;
        if (run.operation < tape->num_operations) run.failed = 2; /* it waits for ever */
        summarise(&run, ends + machine * tape->num_steps, stalls + machine * tape->num_steps);
        for (int lane = 0; lane < LANES; lane++) busy[machine * LANES + lane] = run.busy[lane];
    }
    free(run.first);
    free(run.last);
    free(run.next);
    free(run.left);
    free(run.ready);
    free(run.remaining);
    free(run.end);
    free(run.processed);
    free(run.begun);
    free(run.operation_end);
    free(run.queue);
    free(run.callbacks);
    return run.failed;
}
