/* The host's part of an optimizer step: AdamW on the gradients that wait, which also writes the
 * low-precision weights, in one pass over memory; and sums of gradients.
 *
 * Loaded by zenflow/host/library.py with ctypes, so that the interpreter lock is free while it
 * runs and neither Python's nor torch's headers are needed. It starts no threads: callers,
 * pool.c among them, hand row ranges to their own.
 *
 * A tile's state stays in the first-level cache while it takes all its steps: memory is read and
 * written once for any number of them.
 */
#include "arithmetic.h"

/* The functions with clones are not inlined, also because the compiler must move no
 * arithmetic across the change of mode in their callers. */
CLONES NOINLINE void sum(float *acc, const void *grad, int dtype, int64_t start, int64_t n,
                         float scale, int first)
{
    if (first)
        scale_into(acc + start, grad, dtype, start, n, scale, 0);
    else
        scale_into(acc + start, grad, dtype, start, n, scale, 1);
}

INLINE void catch_up_tile(const HostJob *job, const AdamStep *steps, const Scales *scales,
                        int64_t num_steps, const Scales *upload, int64_t start, int64_t n)
{
    float tile[TILE];
    float *master = job->master + start, *exp_avg = job->exp_avg + start;
    float *exp_avg_sq = job->factored ? NULL : job->exp_avg_sq + start;
    const int64_t row = job->grad_dtype == E4M3 ? start / job->cols : 0;
    const int64_t at = start - row * job->cols;
    for (int64_t k = 0; k < num_steps; k++) {
        if (job->grad_dtype == E4M3)
            scale_groups(tile, steps[k].grad, job->cols, row, at, n, steps[k].scale);
        else
            scale_into(tile, steps[k].grad, job->grad_dtype, start, n, steps[k].scale, 0);
        if (job->factored)
            step_divided_tile(&steps[k], &scales[k], tile, master, exp_avg, n);
        else
            step_tile(&steps[k], &scales[k], tile, master, exp_avg, exp_avg_sq, n);
    }
    if (!upload)
        return;
    if ((!num_steps || !job->repeats_last) && job->factored)
        displace_divided_tile(upload, tile, exp_avg, n);
    else if (!num_steps || !job->repeats_last)
        displace_tile(&job->upload, upload, tile, exp_avg, exp_avg_sq, n);
    for (int64_t i = 0; i < n; i++)
        tile[i] = master[i] - job->lead * tile[i];
    store_upload(job, start, n, tile);
}

/* Whole tiles have a length that the compiler knows: its loops over them have no remainders. */
CLONES NOINLINE void catch_up_run(const HostJob *job, const AdamStep *steps, const Scales *scales,
                                int64_t num_steps, const Scales *upload, int64_t begin,
                                int64_t end)
{
    int64_t start = begin;
    for (; start + TILE <= end; start += TILE)
        catch_up_tile(job, steps, scales, num_steps, upload, start, TILE);
    if (start < end)
        catch_up_tile(job, steps, scales, num_steps, upload, start, end - start);
}

CLONES NOINLINE void copy_run(const HostJob *job, int64_t begin, int64_t end)
{
    if (!job->repeatable)
        store_cast(job->out, job->out_dtype, begin, end - begin, job->master + begin);
    else
        for (int64_t start = begin; start < end; start += TILE)
            store_upload(job, start, end - start < TILE ? end - start : TILE, job->master + start);
}

EXPORT int zenflow_interface(void)
{
    return INTERFACE;
}

/* The instruction set of the loops: the clone's that the loader picks here, else the compiler's. */
EXPORT const char *zenflow_instruction_set(void)
{
#if defined(HAS_CLONES)
    if (WIDEST == 512 && __builtin_cpu_supports("avx512f"))
        return "AVX-512";
    if (__builtin_cpu_supports("avx2"))
        return "AVX2";
#endif
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__SSE2__) || defined(_M_X64)
    return "SSE2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "scalar";
#endif
}

/* Rows low..high-1, which have taken `count` steps and take part, or not, alike. `out` may be the
 * gradient's memory: a tile's gradients have been read when its weights are written. */
static void catch_up_rows(const HostJob *job, int64_t low, int64_t high, int64_t count, int active)
{
    const int64_t begin = low * job->cols, end = high * job->cols;
    const int64_t num_steps = active ? job->num_steps : 0;
    const int leads = job->lead != 0.0f && count + num_steps > 0;
    Scales scales[MOST_STEPS], upload = {0};
    for (int64_t first = 0, last;; first = last) {
        last = num_steps - first > MOST_STEPS ? first + MOST_STEPS : num_steps;
        for (int64_t k = first; k < last; k++)
            scales[k - first] = scales_of(&job->steps[k], count + k + 1);
        const int uploads = last == num_steps && job->out && leads;
        if (uploads)
            upload = scales_of(&job->upload, count + num_steps);
        catch_up_run(job, job->steps + first, scales, last - first, uploads ? &upload : NULL, begin,
                   end);
        if (last == num_steps)
            break;
    }
    if (job->out && !leads)
        copy_run(job, begin, end);
    for (int64_t row = low; row < high; row++)
        job->step[row] += num_steps;
}

/* Neighbouring rows with the same constants run as one, so that short rows vectorise too. Rows with
 * marks run one by one, as their upload before is compared while it is in the cache. */
EXPORT void zenflow_run(const HostJob *job, int64_t low, int64_t high)
{
    const uint64_t mode = flush_subnormals();
    if (job->kind == SUM) {
        const AdamStep *step = job->steps;
        sum(job->sum, step->grad, job->grad_dtype, low * job->cols, (high - low) * job->cols,
            step->scale, job->is_first);
    }
    if (job->kind == COMPACT)
        zenflow_compact_rows(job, low, high);
    for (int64_t row = low, next; job->kind == CATCH_UP && row < high; row = next) {
        const int64_t count = job->step[row];
        const int active = job->active[row] != 0;
        for (next = row + 1; next < high && job->step[next] == count && !job->marks; next++)
            if ((job->active[next] != 0) != active)
                break;
        if (job->marks) {
            const HostJob former = former_of(job);
            catch_up_rows(&former, row, next, count, 0);
        }
        catch_up_rows(job, row, next, count, active);
    }
    restore_mode(mode);
}

INLINE int64_t bits_in(uint64_t word)
{
    word -= (word >> 1) & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + ((word >> 2) & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return (int64_t)(word * 0x0101010101010101u >> 56);
}

/* Rank of the lowest bit of a word that has one. */
INLINE int64_t lowest_of(uint64_t word)
{
#if defined(__GNUC__)
    return __builtin_ctzll(word);
#else
    return bits_in((word & (0 - word)) - 1);
#endif
}

EXPORT int64_t zenflow_gather_marked(uint16_t *values, const uint8_t *marks, int64_t rows,
                                     int64_t cols, int64_t most)
{
    const int64_t words = mark_bytes(cols) / 8;
    uint64_t word;
    int64_t count = 0;
    for (int64_t i = 0; i < rows * words; i++) {
        memcpy(&word, marks + 8 * i, sizeof word);
        count += bits_in(word);
    }
    if (count > most)
        return count;
    uint16_t *next = values;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < words; i++) {
            const uint16_t *group = values + row * cols + i * GROUP;
            memcpy(&word, marks + 8 * (row * words + i), sizeof word);
            for (; word; word &= word - 1)
                *next++ = group[lowest_of(word)];
        }
    return count;
}
