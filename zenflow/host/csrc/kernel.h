/* The host's jobs: what kernel.c does to the rows of one block, and pool.c shares out. */
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
#define INTERFACE 9

/* What a job does with its rows. */
enum { SUM = 0, CATCH_UP = 1, COMPACT = 2 };

/* Elements of compact state, and of gradients of eight bits, that share an exponent byte; the last
 * group of a row may have fewer. */
#define GROUP 64

/* Steps whose constants are held at once, on the stack: float32 state takes more in several passes,
 * and compact state has no more at a time. */
#define MOST_STEPS 64

/* One AdamW step that waits: its gradient, of the job's shape and dtype, and its settings. */
typedef struct {
    const void *grad; /* of E4M3: rows of bytes, see e4m3.py */
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
 * the last step taken where `repeats_last` says that they are the same.
 * COMPACT: the same with compact state, which is written once, after all steps.
 *
 * In a `factored` job a gradient comes divided by the root of its second moment, and there is no
 * second moment here: the displacement is step_size * exp_avg.
 *
 * A `repeatable` upload is of the state as the job leaves it, and its zeros have no sign. So a later
 * job finds it again, as long as no step lies between: `former` and `former_lead` are its settings.
 * Where there are `marks`, these get a bit for each element of `out` that is another one there. */
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
    uint16_t *high; /* compact state: see compact.py */
    int8_t *low;
    uint8_t *exp_avg8;
    uint8_t *exp_avg_sq8;
    uint8_t *exponents1;
    uint8_t *exponents2;
    int64_t first; /* number of the first row's first element in the whole parameter */
    int64_t stride; /* from one row's first element to the next one's */
    uint64_t seed;
    int32_t repeatable;
    float former_lead;
    AdamStep former;
    uint8_t *marks; /* see changes.py */
    int32_t factored; /* no second moments: gradients come divided by their roots */
} HostJob;

/* Does rows low..high-1 of a job. */
EXPORT void zenflow_run(const HostJob *job, int64_t low, int64_t high);

/* Moves the marked elements of (rows, cols) to their beginning, in order; none where they are more
 * than `most`. Returns their number. */
EXPORT int64_t zenflow_gather_marked(uint16_t *values, const uint8_t *marks, int64_t rows,
                                     int64_t cols, int64_t most);

/* Does rows low..high-1 of a job on compact state; subnormals are flushed already. */
void zenflow_compact_rows(const HostJob *job, int64_t low, int64_t high);

#endif
