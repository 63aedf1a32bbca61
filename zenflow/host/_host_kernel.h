/* The host's jobs: what _host_kernel.c does to the rows of one block, and _host_pool.c shares out. */
#ifndef ZENFLOW_HOST_KERNEL_H
#define ZENFLOW_HOST_KERNEL_H

#include <stdint.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#elif defined(_MSC_VER)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

/* Raised with every change of a signature or record: library.py refuses a library built from other
 * code. */
#define INTERFACE 5

/* What a job does with its rows. */
enum { SUM = 0, CATCH_UP = 1 };

/* One AdamW step that waits: its gradient, of the job's shape and dtype, and its settings. */
typedef struct {
    const void *grad;
    double lr;
    double beta1;
    double beta2;
    float scale; /* factor on the gradient */
    float eps;
    float decay; /* factor on the weights, 1 - lr * weight_decay */
} AdamStep;

/* One block's work; jobs.py declares the same fields. A pointer that a kind does not need is null.
 *
 * SUM: sum = scale * grad of the only step, or sum += where it is not the first.
 * CATCH_UP: active rows take all steps, in order, and count them. Then, if there is `out`, every
 * row's weights go there, moved on by `lead` times the displacement of the step `upload`: that of
 * the last step taken where `repeats_last` says that they are the same. */
typedef struct {
    int32_t kind;
    int32_t grad_dtype;
    int32_t out_dtype;
    int32_t is_first;
    int32_t repeats_last;
    float lead;
    int64_t rows;
    int64_t cols;
    float *sum;
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    int64_t *step; /* AdamW steps that each row has taken */
    const uint8_t *active;
    const AdamStep *steps;
    int64_t num_steps;
    void *out;
    AdamStep upload;
} HostJob;

/* Does rows low..high-1 of a job. */
EXPORT void zenflow_run(const HostJob *job, int64_t low, int64_t high);

#endif
