/* Settle: steady steps of a recorded schedule on many machines, as sim.simulate finds them.
 *
 * A run whose state is what it was a window ago goes on as it did since. So it need not go on.
 */

#include "_replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double near_share = 1e-12; /* of the time so far, or of a job's bytes: rounding */

typedef struct {
    double remaining;
    int32_t age, recorded, left, begun;
} Waiting;

/* A run's state at the end of a step, with times and jobs counted back from there. */
typedef struct {
    int32_t step, num_waiting, room, oldest_step;
    double when[TIMERS], left[LANES], since[LANES];
    int32_t flows[LANES], num_flows, running[LANES], num_done, has_chain;
    Waiting *waiting;
} State;

typedef struct {
    const Tape *tape;
    int32_t settling, measured, delayed, counts_work;
    double steady_share;
    Machine machine;
    Run run, fork;
    State *states; /* of the last window's steps */
    State now;
    double *ends, *stalls; /* of steps from 1 on; 0 is the begin */
} Search;

enum { STEP, SLOWEST, STALL, SELECTION, WORKS, NUM_FOUND = WORKS + NUM_WORKS };

/* ---- states -------------------------------------------------------------------------------- */

static int keep_state(const Run *run, State *state) {
    state->step = state->oldest_step = run->step;
    for (int32_t timer = 0; timer < TIMERS; timer++) state->when[timer] = run->when[timer] - run->now;
    for (int32_t lane = 0; lane < LANES; lane++) {
        int32_t is_running = run->running[lane] >= 0;
        state->running[lane] = is_running ? run->num_jobs - run->running[lane] : 0;
        state->since[lane] = is_running ? run->started[lane] - run->now : 0;
    }
    state->num_flows = run->num_flows;
    for (int32_t f = 0; f < run->num_flows; f++) {
        int32_t lane = run->flows[f];
        state->flows[f] = lane;
        state->left[f] = run->left[lane] - run->rate[lane] * (run->now - run->since);
    }
    state->num_done = run->num_done;
    state->has_chain = run->chain >= 0;
    int32_t count = 0;
    for (int32_t number = run->oldest; number < run->num_jobs; number++) {
        const Job *job = &run->jobs[number & (run->capacity - 1)];
        if (job->processed) continue;
        if (count == state->room) {
            int32_t room = 2 * state->room + 64;
            Waiting *grown = realloc(state->waiting, (size_t)room * sizeof(Waiting));
            if (!grown) return 1;
            state->waiting = grown;
            state->room = room;
        }
        state->waiting[count++] = (Waiting){
            job->remaining, run->num_jobs - number, job->recorded, job->left,
            job->begun + 2 * job->over,
        };
        if (job->step < state->oldest_step) state->oldest_step = job->step;
    }
    state->num_waiting = count;
    return 0;
}

static int are_near(double a, double b, double scale) {
    return a == b || fabs(a - b) <= near_share * scale;
}

static int are_same_jobs(const Search *search, int32_t a, int32_t b) {
    const Tape *tape = search->tape;
    if (a == b) return 1;
    const double *sums = search->machine.sums;
    return tape->lane[a] == tape->lane[b] && tape->work[a] == tape->work[b] &&
           tape->bytes[a] == tape->bytes[b] && tape->steps[a] == tape->steps[b] &&
           sums[tape->seconds[a]] == sums[tape->seconds[b]] && tape->step[a] == tape->step[b] &&
           tape->deadline[a] == tape->deadline[b] && tape->rank[a] == tape->rank[b];
}

static int are_same(const Search *search, const State *a, const State *b, double now) {
    if (a->num_waiting != b->num_waiting || a->num_flows != b->num_flows ||
        a->num_done != b->num_done || a->has_chain != b->has_chain)
        return 0;
    for (int32_t timer = 0; timer < TIMERS; timer++)
        if (!are_near(a->when[timer], b->when[timer], now)) return 0;
    for (int32_t lane = 0; lane < LANES; lane++)
        if (a->running[lane] != b->running[lane] || !are_near(a->since[lane], b->since[lane], now))
            return 0;
    const double *bytes = search->tape->bytes;
    for (int32_t at = 0; at < a->num_waiting; at++) {
        const Waiting *own = &a->waiting[at], *other = &b->waiting[at];
        if (own->age != other->age || own->left != other->left || own->begun != other->begun ||
            !are_near(own->remaining, other->remaining, bytes[own->recorded]) ||
            !are_same_jobs(search, own->recorded, other->recorded))
            return 0;
    }
    for (int32_t f = 0; f < a->num_flows; f++)
        if (a->flows[f] != b->flows[f] ||
            !are_near(a->left[f], b->left[f], search->run.size[a->flows[f]]))
            return 0;
    return 1;
}

/* ---- a machine ----------------------------------------------------------------------------- */

/* Return the place of the step that follows so many others without a selection. */
static int32_t place_of(const Tape *tape, int32_t step) {
    int32_t more = step - tape->num_steady;
    return more < 0 ? step : tape->num_steady - tape->period + more % tape->period;
}

static int is_in_phase(const Search *search, int32_t step) {
    return (search->settling - step) % search->tape->period == 0;
}

static int take(Search *search) {
    Run *run = &search->run;
    int failed = take_step(run, place_of(search->tape, run->step));
    search->ends[run->step] = run->now;
    search->stalls[run->step] = stalled(run);
    return failed;
}

static void mark(Run *run) {
    run->mark = run->step;
    memset(run->busy, 0, sizeof run->busy);
    memset(run->earlier, 0, sizeof run->earlier);
}

/* Note the state; return whether it is what it was a window ago, or -1 without memory. */
static int repeats(Search *search) {
    Run *run = &search->run;
    const Tape *tape = search->tape;
    State *before = &search->states[run->step % tape->period];
    if (keep_state(run, &search->now)) return -1;
    int is_again = before->step == run->step - tape->period && before->step > 0 &&
                   are_same(search, &search->now, before, run->now);
    /* Work of earlier steps counts by a window's length: none may be older. */
    if (search->counts_work && search->now.oldest_step <= run->step - tape->period) is_again = 0;
    State kept = *before;
    *before = search->now;
    search->now = kept;
    return is_again;
}

/* Take the steps that settle; return whether they repeat, or -1 if it fails.
 *
 * Leaves a copy of the run behind the last step in phase, with which measuring begins. */
static int settle(Search *search) {
    Run *run = &search->run;
    const Tape *tape = search->tape;
    int32_t from = tape->num_steady - tape->period;
    while (run->step < search->settling) {
        if (take(search)) return -1;
        if (run->step < from) continue;
        int is_due = is_in_phase(search, run->step), is_again = 0;
        if (is_due || !search->counts_work) {
            is_again = repeats(search);
            if (is_again < 0) return -1;
        }
        /* What was counted since the last mark is a window's work, if they repeat. */
        if (is_due && !(is_again && search->counts_work)) mark(run);
        if (is_due && copy_run(&search->fork, run)) return -1;
        if (is_again) return 1;
    }
    return 0;
}

/* Return by how much a selection behind the copied step delays the steps behind it. */
static double delayed(Search *search, int32_t repeats) {
    const Tape *tape = search->tape;
    Run *run = &search->fork;
    int32_t first = run->step, recorded = tape->num_steps - tape->num_steady;
    double begun = run->now, late = 0;
    for (int32_t step = 0; step < search->delayed; step++) {
        int32_t is_usual = step >= recorded;
        int32_t place = is_usual ? place_of(tape, first + step) : tape->num_steady + step;
        if (take_step(run, place)) return 0;
        late = (run->now - begun) - (search->ends[run->step] - search->ends[first]);
        if (!repeats || search->counts_work || step + 1 < recorded) continue;
        if (keep_state(run, &search->now)) {
            run->failed = 1;
            return 0;
        }
        State *usual = &search->states[run->step % tape->period];
        if (are_same(search, &search->now, usual, run->now)) break;
    }
    return late > 0 ? late : 0;
}

/* Go on as since a window ago, as far as is measured from the copied step on. */
static void continue_repeating(Search *search) {
    int32_t period = search->tape->period, last = search->fork.step + search->measured;
    for (int32_t step = search->run.step + 1; step <= last; step++) {
        double *ends = search->ends;
        ends[step] = ends[step - 1] + (ends[step - period] - ends[step - period - 1]);
        search->stalls[step] = search->stalls[step - period];
    }
}

/* Find the steady step of a machine: return 1 if it is, 0 if queues still grow, -1 if it fails. */
static int find(Search *search, double *found) {
    Run *run = &search->run;
    int32_t measured = search->measured, period = search->tape->period;
    reset(run);
    for (int32_t step = 0; step < period; step++) search->states[step].step = -1;
    int is_again = settle(search);
    if (is_again < 0) return -1;
    int32_t first = search->fork.step;
    double work[NUM_WORKS] = {0};
    if (is_again) {
        continue_repeating(search);
        if (search->counts_work) { /* all of a window's, but what is earlier steps' at its begin */
            double windows = (double)(measured / period);
            for (int32_t own = 0; own < NUM_WORKS; own++)
                work[own] = windows * run->busy[own] - run->earlier[own];
            mark(run);
            drain(run);
            for (int32_t own = 0; own < NUM_WORKS; own++) work[own] += run->busy[own];
        }
    } else {
        while (run->step < first + measured)
            if (take(search)) return -1;
        drain(run);
        for (int32_t own = 0; own < NUM_WORKS; own++)
            work[own] = run->busy[own] - run->earlier[own];
    }
    if (run->failed) return -1;
    double total = 0, stall = 0, slowest = 0, window = 0, last = 0;
    for (int32_t step = first + 1; step <= first + measured; step++) {
        double length = search->ends[step] - search->ends[step - 1];
        total += length;
        stall += search->stalls[step];
        slowest = fmax(slowest, length);
        if (step <= first + period) window += length;
        if (step > first + measured - period) last += length;
    }
    found[STEP] = total / measured;
    found[STALL] = stall / measured;
    found[SLOWEST] = slowest;
    for (int32_t own = 0; own < NUM_WORKS; own++) found[WORKS + own] = work[own] / measured;
    double most = work[0] + work[1] + work[2], share = search->steady_share;
    for (int32_t own = 3; own < NUM_WORKS; own++) most = fmax(most, work[own]);
    int is_steady = is_again || (fabs(last - window) <= share * last && most <= total * (1 + share));
    found[SELECTION] = 0;
    if (search->delayed) found[SELECTION] = delayed(search, is_again);
    return search->fork.failed ? -1 : is_steady;
}

/* ---- many machines ------------------------------------------------------------------------- */

static int begin_search(Search *search) {
    const Tape *tape = search->tape;
    size_t steps = (size_t)search->settling + (size_t)search->measured + 1;
    int failed = begin_run(&search->run, tape) | begin_run(&search->fork, tape);
    search->machine.sums = malloc(((size_t)tape->num_sums + 1) * sizeof(double));
    search->states = calloc((size_t)tape->period, sizeof(State));
    search->ends = calloc(steps, sizeof(double));
    search->stalls = calloc(steps, sizeof(double));
    search->run.machine = search->fork.machine = &search->machine;
    return failed ||
           !(search->machine.sums && search->states && search->ends && search->stalls);
}

static void end_search(Search *search) {
    for (int32_t step = 0; search->states && step < search->tape->period; step++)
        free(search->states[step].waiting);
    free(search->now.waiting);
    free(search->states);
    free(search->machine.sums);
    free(search->ends);
    free(search->stalls);
    end_run(&search->run);
    end_run(&search->fork);
}

int32_t sim_settle_interface(void) { return 4; }

/* Find the steady steps of machines, each with its Rates, and with times of its own or the first
 * one's. Give (machines, NUM_FOUND) results: means of step and stall, the slowest step, the delay
 * by one selection, and mean seconds of each kind of work where they are counted; and whether each
 * machine is steady. Return 0; 1 without memory or if a schedule never ends. */
int32_t sim_settle(const Tape *tape, int32_t settling, int32_t measured, int32_t delayed,
                   int32_t counts_work, double steady_share, const double *rates,
                   const double *times, int64_t num_times, int64_t count, double *found,
                   int8_t *is_steady) {
    Search search = {
        .tape = tape, .settling = settling, .measured = measured, .delayed = delayed,
        .counts_work = counts_work, .steady_share = steady_share,
    };
    int failed = begin_search(&search);
    for (int64_t machine = 0; machine < count && !failed; machine++) {
        const double *own = machine && !num_times ? NULL : times + machine * num_times;
        set_up(&search.machine, tape, rates, own);
        rates += sizeof(Rates) / sizeof(double);
        int steady = find(&search, found + machine * NUM_FOUND);
        failed = steady < 0;
        is_steady[machine] = (int8_t)steady;
    }
    end_search(&search);
    return failed;
}
