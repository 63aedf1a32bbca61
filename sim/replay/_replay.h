/* A recorded schedule, as sim.replay.tape has it, and its simulation on one machine. */

#ifndef SIM_REPLAY_H
#define SIM_REPLAY_H

#include <stdint.h>

enum { DEVICE, D2H, H2D, HOST, LAUNCH, LANES };
enum { DOWN, UP, BOTH, DRAM, CORES, RESOURCES };
enum { NUM_WORKS = 7 }; /* kinds of work: forward, backward, step; and of each other lane */

/* Recorded steps. A step refers to jobs by how many were submitted since, or in its own step. */
typedef struct {
    int32_t num_steps;  /* recorded: those without a selection, then those behind one */
    int32_t num_steady; /* number of those without */
    int32_t period;     /* number of the last of them that come again and again */
    int32_t is_cpu;     /* whether a CPU plays the device */
    int32_t num_sums, most_jobs, most_operations; /* most of a step */
    /* steps: begin of each one's rows, and the operation with which the device begins to wait */
    const int32_t *job_at, *operation_at, *gap_at, *stall_begin;
    /* jobs: lane, kind of work, sum that is their seconds, bytes and AdamW steps; step and deadline
     * from the submitting step on; what must end before */
    const int32_t *lane, *work, *seconds;
    const double *bytes, *steps;
    const int32_t *step, *deadline, *rank, *after_at, *after;
    /* what the schedule waits for: a job, or by 0 for a sum of seconds; and the number of the
     * step's jobs that are submitted before */
    const int32_t *awaited, *sleep, *submitted;
    /* waits within backward: for room, from the end of a job on; both from the step's first on */
    const int32_t *passed, *room_at, *room;
    /* sums of times: places of their terms among a machine's times, and factors */
    const int32_t *sum_at, *place;
    const double *factor;
} Tape;

/* Rates of a machine, in the order of sim.replay.arrays.RATES. */
typedef struct {
    double d2h, h2d, duplex, dram, sharing, host_sharing, host, steps, cores, core, pack, unpack;
} Rates;

/* Bytes that each resource moves for one byte of a flow, and the flow's own limit. */
typedef struct {
    double uses[RESOURCES], most, weight;
} Kind;

/* Fair rates of the flows of some lanes. */
typedef struct {
    int32_t is_known;
    double most;                     /* limit of the host's flow among them */
    double rate[LANES], each[LANES]; /* bytes/s, and seconds of a byte */
} Mix;

typedef struct {
    Rates rates;
    double capacity[RESOURCES];
    Kind kinds[LANES];
    Mix mixes[1 << LANES];
    double *sums; /* seconds of each sum of times */
} Machine;

enum { WAKE = LANES, SLEPT, TIMERS }; /* an alarm of each lane, the next flow's end, a sleep's */

typedef struct {
    double remaining;
    int32_t recorded, step, deadline, next, first, last; /* next in the lane; callbacks */
    int32_t left;                                        /* number of ends that it waits for */
    int8_t begun, over, processed; /* own seconds; all; all, and what it sets off */
} Job;

typedef struct {
    int32_t argument, next, type; /* a lane or a job, by type */
} Callback;

typedef struct {
    int64_t order;
    int32_t job;
} Done;

typedef struct {
    int64_t urgency;
    int32_t job;
} Ready;

typedef struct {
    const Tape *tape;
    Machine *machine;
    double now;
    int64_t scheduled;
    double when[TIMERS];
    int64_t order[TIMERS];
    int32_t done_first, num_done, is_crowded; /* whether a timer may go off now */
    int32_t chain, free_callback, callback_room; /* what the present event has still to set off */
    /* jobs by number; those before the oldest are over */
    int32_t oldest, num_jobs, capacity, num_ends;
    /* lanes */
    int32_t head[LANES], tail[LANES], running[LANES], ready_first, num_ready;
    double started[LANES];
    /* flows, in the order in which they began, by lane */
    int32_t flows[LANES], num_flows, mix, ending, is_ending;
    double left[LANES], size[LANES], rate[LANES], host_most, since;
    /* the schedule */
    int32_t step, recorded, first_job, num_submitted, operation, is_over, failed;
    /* seconds of work since the mark: of all, and of jobs of steps up to it */
    int32_t mark;
    double busy[NUM_WORKS], earlier[NUM_WORKS];
    Job *jobs;
    Callback *callbacks;
    Done *done;
    Ready *ready;
    double *operation_end, *ends; /* of this step's waits, and of the last jobs */
} Run;

#if defined(__GNUC__) /* no names for other libraries */
#pragma GCC visibility push(hidden)
#endif

/* Prepare a run of a tape. Return 1 without memory. */
int begin_run(Run *run, const Tape *tape);
void end_run(Run *run);

void set_up(Machine *machine, const Tape *tape, const double *rates, const double *times);
void reset(Run *run);

/* Take a recorded step; return 1 without memory, or if it never ends. */
int take_step(Run *run, int32_t recorded);

/* Return the seconds in which the device waited in the step that is over. */
double stalled(const Run *run);

/* Let everything end that has been submitted. */
void drain(Run *run);

/* Make a run what another one is. Return 1 without memory. */
int copy_run(Run *run, const Run *other);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
