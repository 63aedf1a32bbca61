/* A recorded schedule, as sim.replay.tape has it. */

#ifndef SIM_REPLAY_H
#define SIM_REPLAY_H

#include <stdint.h>

enum {
    RATE_D2H,
    RATE_H2D,
    RATE_DUPLEX,
    RATE_DRAM,
    RATE_SHARING,
    RATE_HOST_SHARING,
    RATE_HOST,
    RATE_STEPS,
    NUM_RATES
};

typedef struct {
    int32_t num_jobs, num_operations, num_steps;
    int32_t settling; /* step from which on lanes' busy seconds count */
    /* jobs, in the order in which they are submitted */
    const int8_t *lane;
    const int8_t *is_awaited;
    const double *bytes, *steps;
    const int32_t *step, *deadline, *rank;
    const int64_t *after_at;
    const int32_t *after;
    /* what the schedule waits for: a job, or -1 for some seconds; and jobs submitted before */
    const int32_t *awaited;
    const int32_t *submitted;
    /* steps: operations with which they end, and with which the device begins to wait */
    const int32_t *step_end, *stall_begin;
    /* waits within backward of each step: for room, from the end of a job on */
    const int32_t *gap_at;
    const int32_t *passed;
    const int64_t *room_at;
    const int32_t *room;
} Tape;

int32_t sim_replay_interface(void);

/* Replay a schedule on machines, each with NUM_RATES and with seconds of jobs and of sleeps, of its
 * own or the first one's. Give (machines, steps) ends and stalls, and (machines, lanes) seconds of
 * work. Return 0; 1 without memory; 2 if a schedule never ends. */
int32_t sim_replay(const Tape *tape, const double *rates, const double *seconds,
                   const double *sleeps, int64_t are_own, int64_t count, double *ends,
                   double *stalls, double *busy);

#endif
