/* A catch-up pass over compact state: a group's codes are read, take all steps as float32 numbers,
 * and are written again. zenflow/host/compact.py has the format.
 *
 * Random bits are a function of a key and of the element's number in the whole parameter. So the
 * result does not depend on how rows are cut into calls.
 */
#include "_host_arithmetic.h"

/* Codes are bytes, which 512-bit vectors of "avx512f" alone can't hold. */
#if defined(HAS_CLONES)
#define WIDE_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDE_CLONES CLONES
#endif

/* Steps of the sequences of random bits from element to element, as compact.py has them. */
#define ODD_WEIGHT 0x9E3779B1u
#define ODD_FIRST 0xC2B2AE35u
#define ODD_SECOND 0x85EBCA6Bu

/* Bits of a float32 below a moment's code; octaves from a group's byte to its largest exponent. */
enum { BITS = 20, ROOM_FIRST = 14, ROOM_SECOND = 30 };

typedef struct {
    uint32_t weight;
    uint32_t first;
    uint32_t second;
} Keys;

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

INLINE void decode(const Group *group, float *restrict master, float *restrict exp_avg,
                   float *restrict exp_avg_sq, int64_t n)
{
    const uint16_t *restrict high = group->high;
    const int8_t *restrict low = group->low;
    const uint8_t *restrict first = group->first, *restrict second = group->second;
    const uint32_t base1 = (uint32_t)*group->first_exponent << 3;
    const uint32_t base2 = (uint32_t)*group->second_exponent << 3;
    for (int64_t i = 0; i < n; i++)
        master[i] = as_float(((uint32_t)high[i] << 16) + ((uint32_t)(int32_t)low[i] << 8));
    for (int64_t i = 0; i < n; i++) {
        const uint32_t code = first[i] & 0x7fu;
        const uint32_t size = code ? (code + base1) << BITS : 0u;
        exp_avg[i] = as_float(size | (uint32_t)(first[i] & 0x80u) << 24);
    }
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

INLINE uint8_t exponent_of(uint32_t bits, int32_t room)
{
    const int32_t exponent = (int32_t)(bits >> 23) - room;
    return (uint8_t)(exponent > 0 ? exponent : 0);
}

/* Signed comparisons, which every instruction set has: codes and bits of sizes are below 2^31. */
INLINE void encode(const Group *group, const float *restrict master, const float *restrict exp_avg,
                   const float *restrict exp_avg_sq, const Keys *keys, uint32_t number, int64_t n)
{
    uint16_t *restrict high = group->high;
    int8_t *restrict low = group->low;
    uint8_t *restrict first = group->first, *restrict second = group->second;
    const uint32_t key1 = keys->weight + number * ODD_WEIGHT;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t drawn = (key1 + (uint32_t)i * ODD_WEIGHT) >> 24;
        const uint32_t bits = as_bits(master[i]) + drawn;
        high[i] = (uint16_t)((bits + 0x8000u) >> 16);
        low[i] = (int8_t)(bits >> 8);
    }
    const uint8_t exponent1 = exponent_of(largest(exp_avg, n), ROOM_FIRST);
    const int32_t base1 = (int32_t)exponent1 << 3;
    const float smallest = as_float((uint32_t)(base1 + 1) << BITS) * (1.0f / (1 << BITS));
    const uint32_t key2 = keys->first + number * ODD_FIRST;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(exp_avg[i]), size = bits & 0x7fffffffu;
        const int32_t drawn = (int32_t)((key2 + (uint32_t)i * ODD_FIRST) >> 12);
        int32_t code = (int32_t)((size + (uint32_t)drawn) >> BITS) - base1;
        const int32_t lifted = (float)drawn * smallest < as_float(size);
        code = code > 127 ? 127 : code;
        code = code > lifted ? code : lifted;
        first[i] = (uint8_t)((uint32_t)code | (bits >> 31) << 7);
    }
    *group->first_exponent = exponent1;
    const uint8_t exponent2 = exponent_of(largest(exp_avg_sq, n), ROOM_SECOND);
    const int32_t base2 = (int32_t)exponent2 << 3;
    const uint32_t key3 = keys->second + number * ODD_SECOND;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(exp_avg_sq[i]);
        const uint32_t drawn = (key3 + (uint32_t)i * ODD_SECOND) >> 12;
        int32_t code = (int32_t)((bits + drawn) >> BITS) - base2;
        const int32_t least = bits != 0u;
        code = code > 255 ? 255 : code;
        code = code > least ? code : least;
        second[i] = (uint8_t)code;
    }
    *group->second_exponent = exponent2;
}

INLINE void catch_up_group(const HostJob *job, const Group *group, const Scales *scales,
                           int64_t num_steps, const Scales *upload, const Keys *keys,
                           int64_t row, int64_t at, uint32_t number, int64_t n)
{
    const int64_t start = row * job->cols + at;
    float tile[GROUP], master[GROUP], exp_avg[GROUP];
    float exp_avg_sq[GROUP];
    decode(group, master, exp_avg, exp_avg_sq, n);
    for (int64_t k = 0; k < num_steps; k++) {
        const AdamStep *step = &job->steps[k];
        if (job->grad_dtype == E4M3)
            scale_group(tile, row_of(step->grad, job->cols, row), job->cols, at, n, step->scale);
        else
            scale_into(tile, step->grad, job->grad_dtype, start, n, step->scale, 0);
        step_tile(step, &scales[k], tile, master, exp_avg, exp_avg_sq, n);
    }
    if (num_steps) {
        encode(group, master, exp_avg, exp_avg_sq, keys, number, n);
        if (job->repeatable)
            decode(group, master, exp_avg, exp_avg_sq, n);
    }
    if (!job->out)
        return;
    if (upload) {
        if (!num_steps || !job->repeats_last || job->repeatable)
            displace_tile(&job->upload, upload, tile, exp_avg, exp_avg_sq, n);
        for (int64_t i = 0; i < n; i++)
            tile[i] = master[i] - job->lead * tile[i];
        store_upload(job, start, n, tile);
    } else {
        store_upload(job, start, n, master);
    }
}

WIDE_CLONES NOINLINE void compact_row(const HostJob *job, int64_t row, const Scales *scales,
                                 int64_t num_steps, const Scales *upload, const Keys *keys)
{
    const int64_t cols = job->cols, begin = row * cols;
    const int64_t groups = (cols + GROUP - 1) / GROUP;
    const uint32_t number = (uint32_t)(job->first + row * job->stride);
    for (int64_t at = 0, place = row * groups; at < cols; at += GROUP, place++) {
        const int64_t start = begin + at;
        const Group group = {job->high + start,      job->low + start,
                             job->exp_avg8 + start,  job->exp_avg_sq8 + start,
                             job->exponents1 + place, job->exponents2 + place};
        const uint32_t own = number + (uint32_t)at;
        if (at + GROUP <= cols) /* a length that the compiler knows */
            catch_up_group(job, &group, scales, num_steps, upload, keys, row, at, own, GROUP);
        else
            catch_up_group(job, &group, scales, num_steps, upload, keys, row, at, own, cols - at);
    }
}

static void catch_up_row(const HostJob *job, int64_t row, int64_t num_steps)
{
    const int64_t count = job->step[row];
    const int leads = job->out && job->lead != 0.0f && count + num_steps > 0;
    const Keys keys = keys_of(job->seed, count + num_steps);
    Scales scales[MOST_STEPS], upload = {0};
    for (int64_t k = 0; k < num_steps; k++)
        scales[k] = scales_of(&job->steps[k], count + k + 1);
    if (leads)
        upload = scales_of(&job->upload, count + num_steps);
    compact_row(job, row, scales, num_steps, leads ? &upload : NULL, &keys);
    job->step[row] += num_steps;
}

void zenflow_compact_rows(const HostJob *job, int64_t low, int64_t high)
{
    for (int64_t row = low; row < high; row++) {
        if (job->marks) {
            const HostJob former = former_of(job);
            catch_up_row(&former, row, 0);
        }
        catch_up_row(job, row, job->active[row] ? job->num_steps : 0);
    }
}
