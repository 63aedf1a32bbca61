/* Runs: a machine's rates as flows and times, and the memory of a run. */

#include "_replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void set_up(Machine *machine, const Tape *tape, const double *rates, const double *times) {
    memcpy(&machine->rates, rates, sizeof machine->rates);
    const Rates *own = &machine->rates;
    const double capacity[RESOURCES] = {own->d2h, own->h2d, own->duplex, own->dram, own->cores};
    memcpy(machine->capacity, capacity, sizeof capacity);
    memset(machine->kinds, 0, sizeof machine->kinds);
    memset(machine->mixes, 0, sizeof machine->mixes);
    Kind *kinds = machine->kinds;
    for (int32_t lane = 0; lane < LANES; lane++) {
        kinds[lane].most = INFINITY;
        kinds[lane].weight = 1;
    }
    kinds[D2H].uses[DOWN] = kinds[D2H].uses[BOTH] = 1;
    kinds[H2D].uses[UP] = kinds[H2D].uses[BOTH] = 1;
    kinds[HOST].most = own->host;
    if (tape->is_cpu) { /* whose threads all share the cores, each in proportion to its rate */
        kinds[DEVICE].uses[CORES] = kinds[DEVICE].most = 1;
        kinds[D2H].most = kinds[D2H].weight = own->pack;
        kinds[H2D].most = kinds[H2D].weight = own->unpack;
        kinds[HOST].weight = own->core;
        for (int32_t lane = D2H; lane <= HOST; lane++)
            kinds[lane].uses[CORES] = 1 / kinds[lane].weight;
    } else {
        kinds[D2H].uses[DRAM] = kinds[H2D].uses[DRAM] = own->sharing;
        kinds[HOST].uses[DRAM] = own->host_sharing;
    }
    if (!times) return; /* those of the machine before */
    for (int32_t sum = 0; sum < tape->num_sums; sum++) {
        double seconds = 0;
        for (int32_t at = tape->sum_at[sum]; at < tape->sum_at[sum + 1]; at++)
            seconds += times[tape->place[at]] * tape->factor[at];
        machine->sums[sum] = seconds;
    }
}

void reset(Run *run) {
    run->now = run->since = 0;
    run->scheduled = 0;
    run->done_first = run->num_done = run->ready_first = 0;
    run->chain = -1;
    run->oldest = run->num_jobs = run->num_ready = run->num_flows = 0;
    run->is_crowded = run->mix = run->is_ending = run->step = run->failed = run->mark = 0;
    for (int32_t timer = 0; timer < TIMERS; timer++) run->when[timer] = INFINITY;
    for (int32_t lane = 0; lane < LANES; lane++) {
        run->head[lane] = run->tail[lane] = run->running[lane] = -1;
        run->left[lane] = INFINITY;
        run->rate[lane] = 0;
    }
    memset(run->busy, 0, sizeof run->busy);
    memset(run->earlier, 0, sizeof run->earlier);
    run->free_callback = -1;
    for (int32_t at = run->callback_room - 1; at >= 0; at--) {
        run->callbacks[at].next = run->free_callback;
        run->free_callback = at;
    }
}

static int make_buffers(Run *run) {
    size_t jobs = (size_t)run->capacity;
    run->jobs = malloc(jobs * sizeof(Job));
    run->done = malloc(jobs * sizeof(Done));
    run->ready = malloc(jobs * sizeof(Ready));
    run->callbacks = malloc((size_t)run->callback_room * sizeof(Callback));
    run->ends = malloc((size_t)run->num_ends * sizeof(double));
    run->operation_end = malloc(((size_t)run->tape->most_operations + 1) * sizeof(double));
    return !(run->jobs && run->done && run->ready && run->callbacks && run->ends &&
             run->operation_end);
}

int begin_run(Run *run, const Tape *tape) {
    memset(run, 0, sizeof *run);
    run->tape = tape;
    run->capacity = run->callback_room = run->num_ends = 256;
    while (run->num_ends < 8 * tape->most_jobs) run->num_ends *= 2;
    return make_buffers(run);
}

void end_run(Run *run) {
    free(run->jobs);
    free(run->done);
    free(run->ready);
    free(run->callbacks);
    free(run->ends);
    free(run->operation_end);
}

int copy_run(Run *run, const Run *other) {
    if (run->capacity != other->capacity || run->callback_room != other->callback_room) {
        end_run(run);
        run->capacity = other->capacity;
        run->callback_room = other->callback_room;
        if (make_buffers(run)) return 1;
    }
    Run kept = *run;
    *run = *other;
    run->jobs = kept.jobs;
    run->done = kept.done;
    run->ready = kept.ready;
    run->callbacks = kept.callbacks;
    run->ends = kept.ends;
    run->operation_end = kept.operation_end;
    memcpy(run->jobs, other->jobs, (size_t)run->capacity * sizeof(Job));
    memcpy(run->done, other->done, (size_t)run->capacity * sizeof(Done));
    memcpy(run->ready, other->ready, (size_t)run->capacity * sizeof(Ready));
    memcpy(run->callbacks, other->callbacks, (size_t)run->callback_room * sizeof(Callback));
    memcpy(run->ends, other->ends, (size_t)run->num_ends * sizeof(double));
    return 0;
}
