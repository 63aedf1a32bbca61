/* A catch-up pass over compact state: a group's codes are read, take all steps as float32 numbers,
 * and are written again. zenflow/host/compact.py has the format.
 *
 * Random bits are a function of a key and of the element's number in the whole parameter. So the
 * result does not depend on how rows are cut into calls.
 */
#include "compact.h"

static uint64_t mixed(uint64_t state)
{
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

/* Two numbers of SplitMix64, begun at the seed and the row's count of steps. */
static Keys keys_of(uint64_t seed, int64_t count)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    const uint64_t state = seed + (uint64_t)count * golden + golden;
    const uint64_t one = mixed(state), two = mixed(state + golden);
    const Keys keys = {(uint32_t)one, (uint32_t)(one >> 32), (uint32_t)two};
    return keys;
}

/* A group of one row: its codes, and the numbers that they mean. */
typedef struct {
    uint16_t *high;
    int8_t *low;
    uint8_t *first;
    uint8_t *second;
    uint8_t *first_exponent;
    uint8_t *second_exponent;
} Group;

/* In factored state there are no second moments: their codes are null, and their numbers too. */
INLINE void decode(const Group *group, float *restrict master, float *restrict exp_avg,
                   float *restrict exp_avg_sq, int64_t n, int factored)
{
    const uint16_t *restrict high = group->high;
    const int8_t *restrict low = group->low;
    const uint8_t *restrict first = group->first, *restrict second = group->second;
    const uint32_t base1 = (uint32_t)*group->first_exponent << 3;
    for (int64_t i = 0; i < n; i++)
        master[i] = as_float(((uint32_t)high[i] << 16) + ((uint32_t)(int32_t)low[i] << 8));
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = first[i] & 0x7fu;
        const uint32_t size = code ? (code + base1) << BITS : 0u;
        exp_avg[i] = as_float(size | (uint32_t)(first[i] & 0x80u) << 24);
    }
    if (factored)
        return;
    const uint32_t base2 = (uint32_t)*group->second_exponent << 3;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = second[i];
        exp_avg_sq[i] = as_float(code ? (code + base2) << BITS : 0u);
    }
}

INLINE uint32_t largest(const float *restrict values, int64_t n)
{
    uint32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(values[i]) & 0x7fffffffu;
        found = bits > found ? bits : found;
    }
    return found;
}

/* Signed comparisons, which every instruction set has: codes and bits of sizes are below 2^31. */
INLINE void encode(const Group *group, const float *restrict master, const float *restrict exp_avg,
                   const float *restrict exp_avg_sq, const Keys *keys, uint32_t at, int64_t n,
                   int factored)
{
    uint16_t *restrict high = group->high;
    int8_t *restrict low = group->low;
    uint8_t *restrict first = group->first, *restrict second = group->second;
    const uint32_t key1 = keys->weight + at * ODD_WEIGHT;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t drawn = (key1 + (uint32_t)i * ODD_WEIGHT) >> 24;
        const uint32_t bits = as_bits(master[i]) + drawn;
        high[i] = (uint16_t)((bits + 0x8000u) >> 16);
        low[i] = (int8_t)(bits >> 8);
    }
    const uint32_t exponent1 = exponent_of(largest(exp_avg, n) >> 23, ROOM_FIRST);
    const int32_t base1 = (int32_t)exponent1 << 3;
    const float smallest = as_float((uint32_t)(base1 + 1) << BITS) * (1.0f / (1 << BITS));
    const uint32_t key2 = keys->first + at * ODD_FIRST;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(exp_avg[i]), size = bits & 0x7fffffffu;
        const int32_t drawn = (int32_t)((key2 + (uint32_t)i * ODD_FIRST) >> 12);
        int32_t code = (int32_t)((size + (uint32_t)drawn) >> BITS) - base1;
        const int32_t lifted = (float)drawn * smallest < as_float(size);
        code = code > 127 ? 127 : code;
        code = code > lifted ? code : lifted;
        first[i] = (uint8_t)((uint32_t)code | (bits >> 31) << 7);
    }
    *group->first_exponent = (uint8_t)exponent1;
    if (factored)
        return;
    const uint32_t exponent2 = exponent_of(largest(exp_avg_sq, n) >> 23, ROOM_SECOND);
    const int32_t base2 = (int32_t)exponent2 << 3;
    const uint32_t key3 = keys->second + at * ODD_SECOND;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(exp_avg_sq[i]);
        const uint32_t drawn = (key3 + (uint32_t)i * ODD_SECOND) >> 12;
        int32_t code = (int32_t)((bits + drawn) >> BITS) - base2;
        const int32_t least = bits != 0u;
        code = code > 255 ? 255 : code;
        code = code > least ? code : least;
        second[i] = (uint8_t)code;
    }
    *group->second_exponent = (uint8_t)exponent2;
}

/* The tile has the displacement where it is known, and is overwritten. */
INLINE void upload_group(const RowUpload *upload, int is_known, float *restrict tile,
                         const float *restrict master, const float *restrict exp_avg,
                         const float *restrict exp_avg_sq, int64_t start, int64_t n, int factored)
{
    const HostJob *job = upload->job;
    if (!upload->scales) {
        store_upload(job, start, n, master);
        return;
    }
    if (!is_known && factored)
        displace_divided_tile(upload->scales, tile, exp_avg, n);
    else if (!is_known)
        displace_tile(&job->upload, upload->scales, tile, exp_avg, exp_avg_sq, n);
    for (int64_t i = 0; i < n; i++)
        tile[i] = master[i] - job->lead * tile[i];
    store_upload(job, start, n, tile);
}

INLINE void catch_up_group(const RowPass *pass, const Group *group, int64_t at, int64_t n,
                           int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at;
    float tile[GROUP], master[GROUP], exp_avg[GROUP], exp_avg_sq[GROUP];
    decode(group, master, exp_avg, exp_avg_sq, n, factored);
    if (job->marks)
        upload_group(&pass->former, 0, tile, master, exp_avg, exp_avg_sq, start, n, factored);
    for (int64_t k = 0; k < pass->num_steps; k++) {
        const AdamStep *step = &job->steps[k];
        if (job->grad_dtype == E4M3)
            scale_group(tile, row_of(step->grad, job->cols, pass->row), job->cols, at, n,
                        step->scale);
        else
            scale_into(tile, step->grad, job->grad_dtype, start, n, step->scale, 0);
        if (factored)
            step_divided_tile(step, &pass->scales[k], tile, master, exp_avg, n);
        else
            step_tile(step, &pass->scales[k], tile, master, exp_avg, exp_avg_sq, n);
    }
    if (pass->num_steps) {
        encode(group, master, exp_avg, exp_avg_sq, &pass->keys, (uint32_t)at, n, factored);
        if (job->repeatable)
            decode(group, master, exp_avg, exp_avg_sq, n, factored);
    }
    if (job->out)
        upload_group(&pass->upload, repeats_last(pass), tile, master, exp_avg, exp_avg_sq, start,
                     n, factored);
}

INLINE void compact_groups(const RowPass *pass, int64_t begin, int64_t end, int factored)
{
    const HostJob *job = pass->job;
    for (int64_t at = begin; at < end; at += GROUP) {
        const int64_t start = pass->row * job->cols + at, place = place_of(pass, at);
        const Group group = {job->high + start,
                             job->low + start,
                             job->exp_avg8 + start,
                             factored ? NULL : job->exp_avg_sq8 + start,
                             job->exponents1 + place,
                             factored ? NULL : job->exponents2 + place};
        if (at + GROUP <= end) /* a length that the compiler knows */
            catch_up_group(pass, &group, at, GROUP, factored);
        else
            catch_up_group(pass, &group, at, end - at, factored);
    }
}

CLONES NOINLINE void compact_part(const RowPass *pass, int64_t begin, int64_t end)
{
    compact_groups(pass, begin, end, 0);
}

CLONES NOINLINE void factored_part(const RowPass *pass, int64_t begin, int64_t end)
{
    compact_groups(pass, begin, end, 1);
}

void zenflow_compact_part(const RowPass *pass, int64_t begin, int64_t end)
{
    if (pass->job->factored)
        factored_part(pass, begin, end);
    else
        compact_part(pass, begin, end);
}

static void catch_up_row(const HostJob *job, const HostJob *former, int64_t row,
                         int64_t num_steps)
{
    const int64_t before = job->step[row], count = before + num_steps;
    const uint32_t number = (uint32_t)(job->first + row * job->stride);
    Keys keys = keys_of(job->seed, count);
    keys.weight += number * ODD_WEIGHT;
    keys.first += number * ODD_FIRST;
    keys.second += number * ODD_SECOND;
    Scales scales[MOST_STEPS], of_upload, of_former;
    RowPass pass = {job, row, num_steps, scales, {job, NULL}, {former, NULL}, keys};
    for (int64_t k = 0; k < num_steps; k++)
        scales[k] = scales_of(&job->steps[k], before + k + 1);
    if (job->out && job->lead != 0.0f && count > 0) {
        of_upload = scales_of(&job->upload, count);
        pass.upload.scales = &of_upload;
    }
    if (job->marks && former->lead != 0.0f && before > 0) {
        of_former = scales_of(&former->upload, before);
        pass.former.scales = &of_former;
    }
    int64_t done = 0;
#if defined(HAS_CLONES)
    if (WIDEST == 512 && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        done = zenflow_compact_512(&pass);
    else if (__builtin_cpu_supports("avx2"))
        done = zenflow_compact_256(&pass);
#endif
    if (done < job->cols)
        zenflow_compact_part(&pass, done, job->cols);
    job->step[row] = count;
}

void zenflow_compact_rows(const HostJob *job, int64_t low, int64_t high)
{
    const HostJob former = former_of(job);
    for (int64_t row = low; row < high; row++)
        catch_up_row(job, &former, row, job->active[row] ? job->num_steps : 0);
}
