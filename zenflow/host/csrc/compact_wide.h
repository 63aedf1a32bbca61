/* Whole groups of compact state in vectors, from codes to codes. The results are those of
 * compact.c, which does all other groups. The file that includes this one has chosen the
 * vectors.
 */
#ifndef ZENFLOW_HOST_COMPACT_WIDE_H
#define ZENFLOW_HOST_COMPACT_WIDE_H

#include "compact_words.h"

/* Elements from a group to the one that is fetched meanwhile. */
enum { AHEAD = 8 * GROUP };

/* 32 elements; the last step's root and displacement. In factored state there are no second moments
 * and no roots: each function is told by `factored`, which the compiler knows. */
typedef struct {
    Pair master, exp_avg, exp_avg_sq;
    Pair root, delta;
} Half;

/* scale * grad */
INLINE Pair gradient(const RowPass *pass, const AdamStep *step, int dtype, int64_t at)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at;
    float factor = step->scale;
    Pair pair;
    if (dtype == BFLOAT16) {
        pair = unpacked(load((const uint16_t *)step->grad + start), every16(0));
    } else if (dtype == E4M3) {
        const uint8_t *codes = row_of(step->grad, job->cols, pass->row);
        const uint32_t exponent = codes[job->cols + at / GROUP];
        factor = exponent == NOT_FINITE ? as_float(0x7fc00000u) : factor;
        pair = decoded_signed(codes + at, base_of(exponent));
    } else {
        float tile[HALF];
        scale_into(tile, step->grad, dtype, start, HALF, factor, 0);
        return numbers_at(tile);
    }
    return factor == 1.0f ? pair : times(pair, all(factor));
}

INLINE Pair displacement(float eps, const Scales *scales, Pair exp_avg, Pair root)
{
    const Pair denom = plus(times(root, all(scales->inverse_denom_scale)), all(eps));
    return over(times(all(scales->step_size), exp_avg), denom);
}

INLINE Pair divided_displacement(const Scales *scales, Pair exp_avg)
{
    return times(all(scales->step_size), exp_avg);
}

/* The first part of step_tile; 1 - beta1 is below 0.5. */
INLINE void step_moments(const Scales *scales, Pair grad, Half *half, int factored)
{
    const Pair change = times(minus(grad, half->exp_avg), all(scales->one_minus_beta1));
    half->exp_avg = plus(half->exp_avg, change);
    if (factored)
        return;
    const Pair square = times(times(all(scales->one_minus_beta2), grad), grad);
    half->exp_avg_sq = plus(times(half->exp_avg_sq, all(scales->beta2)), square);
    half->root = roots(half->exp_avg_sq);
}

/* Its second part. */
INLINE void step_weights(const AdamStep *step, const Scales *scales, Half *half, int factored)
{
    half->delta = factored ? divided_displacement(scales, half->exp_avg)
                           : displacement(step->eps, scales, half->exp_avg, half->root);
    half->master = minus(times(half->master, all(step->decay)), half->delta);
}

/* An upload's weights: moved on by the displacement, if there is a lead. */
INLINE Pair led(const RowUpload *upload, const Half *half, int is_known, int factored)
{
    Pair delta = half->delta;
    if (!upload->scales)
        return half->master;
    if (!is_known)
        delta = factored ? divided_displacement(upload->scales, half->exp_avg)
                         : displacement(upload->job->upload.eps, upload->scales, half->exp_avg,
                                        roots(half->exp_avg_sq));
    return minus(half->master, times(all(upload->job->lead), delta));
}

INLINE Vec half_words(Pair values, int dtype)
{
    if (dtype == BFLOAT16 && __builtin_expect(!any_nan(values.a, values.b), 1))
        return to_bfloat16_words(values);
    float tile[HALF];
    uint16_t words[HALF];
    store_floats(tile, values.a, values.b);
    store_cast(words, dtype == BFLOAT16 ? BFLOAT16 : FLOAT16, 0, HALF, tile);
    return load(words);
}

/* Words of a repeatable upload: their zeros have no sign. */
INLINE Vec repeatable_words(Pair values, int dtype)
{
    return zero_where_equal(half_words(values, dtype), every16(0x8000));
}

INLINE void put_upload(const HostJob *job, int64_t start, Pair values)
{
    if (job->out_dtype == FLOAT32)
        store_floats((float *)job->out + start, values.a, values.b);
    else
        store((uint16_t *)job->out + start, half_words(values, job->out_dtype));
}

INLINE Vec largest_size(Pair one, Pair two)
{
    return larger_size(larger_size(one.a, one.b), larger_size(two.a, two.b));
}

INLINE Vec largest_bits(Pair one, Pair two)
{
    return max32(max32(one.a, one.b), max32(two.a, two.b));
}

/* Inverses of the largest words of both moments, in the lowest words. A NaN among first moments
 * shows in the second ones, as larger_size may pass it over; in factored state these are the sizes
 * of the first. */
INLINE void smallest_inverses(const Half *one, const Half *two, __m128i found[2], int factored)
{
    const Vec first = largest_size(one->exp_avg, two->exp_avg);
    const Vec second = factored ? largest_bits(sizes(one->exp_avg), sizes(two->exp_avg))
                                : largest_bits(one->exp_avg_sq, two->exp_avg_sq);
    highest_words(first, second, &found[0], &found[1]);
    for (int moment = 0; moment < 2; moment++)
        found[moment] = _mm_minpos_epu16(_mm_xor_si128(found[moment], _mm_set1_epi16(-1)));
}

/* Whether a moment with this inverse is infinite or NaN. */
INLINE int is_not_finite(__m128i inverse)
{
    return (_mm_cvtsi128_si32(inverse) & 0xffff) <= 0x807f;
}

/* Keys of a group's first element. */
INLINE Keys keys_at(const RowPass *pass, int64_t at)
{
    const Keys keys = {pass->keys.weight + (uint32_t)at * ODD_WEIGHT,
                       pass->keys.first + (uint32_t)at * ODD_FIRST,
                       pass->keys.second + (uint32_t)at * ODD_SECOND};
    return keys;
}

/* Moments of a half that become codes. */
typedef struct {
    Vec word1, word2, size1, size2;
} Coded;

INLINE Coded begin_codes(const Keys *keys, int which, const Half *half, int factored)
{
    Coded own;
    own.word1 = rounded(half->exp_avg, keys->first, OF_FIRST, which);
    if (!factored)
        own.word2 = rounded(half->exp_avg_sq, keys->second, OF_SECOND, which);
    return own;
}

INLINE Vec set_sizes(Coded *own, Vec base1, Vec base2, int factored)
{
    own->size1 = sub16_to_zero(bits_in_both(own->word1, every16(0x7fff)), base1);
    if (factored)
        return own->size1;
    own->size2 = sub16_to_zero(own->word2, base2);
    return min16(own->size1, own->size2);
}

INLINE void lift_codes(Coded *own, Pair exp_avg, uint32_t exponent, uint32_t key, int which,
                       int factored)
{
    own->size1 = lifted_first(own->size1, exp_avg, exponent, key, which);
    if (!factored)
        own->size2 = lifted_second(own->size2, own->word2);
}

INLINE Vec first_bytes(const Coded *own)
{
    return selected(every16(0x80), right16(own->word1, 8), right16(own->size1, 4));
}

INLINE void put_weights(const HostJob *job, int64_t start, uint32_t key, const Half *one,
                        const Half *two)
{
    uint16_t *high = job->high + start;
    const Vec low1 = encode_weights(one->master, key, 0, high);
    const Vec low2 = encode_weights(two->master, key, 1, high + HALF);
    store_bytes(job->low + start, low1, low2);
}

/* An upload's weights; `former` are the words of the upload before, where there are marks. */
INLINE void upload_half(const RowPass *pass, int64_t at, const Half *half, Vec former,
                        int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at;
    if (!job->repeatable) {
        put_upload(job, start, led(&pass->upload, half, repeats_last(pass), factored));
        return;
    }
    const Pair values = led(&pass->upload, half, 0, factored);
    const Vec words = repeatable_words(values, job->out_dtype);
    if (job->marks) {
        const uint32_t marks = differing(words, former);
        memcpy(job->marks + pass->row * mark_bytes(job->cols) + at / 8, &marks, sizeof marks);
    }
    store((uint16_t *)job->out + start, words);
}

/* A step on both halves, up to the roots, and from there. */
INLINE void begin_step(const RowPass *pass, int64_t k, int64_t at, int dtype, Half *one, Half *two,
                       int factored)
{
    const AdamStep *step = &pass->job->steps[k];
    step_moments(&pass->scales[k], gradient(pass, step, dtype, at), one, factored);
    step_moments(&pass->scales[k], gradient(pass, step, dtype, at + HALF), two, factored);
}

INLINE void end_step(const RowPass *pass, int64_t k, Half *one, Half *two, int factored)
{
    step_weights(&pass->job->steps[k], &pass->scales[k], one, factored);
    step_weights(&pass->job->steps[k], &pass->scales[k], two, factored);
}

INLINE void decode_weights(const RowPass *pass, int64_t at, Half *one, Half *two)
{
    const int64_t start = pass->row * pass->job->cols + at;
    one->master = decoded_weights(pass->job, start);
    two->master = decoded_weights(pass->job, start + HALF);
}

INLINE void decode_moments(const RowPass *pass, int64_t at, Half *one, Half *two, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at, place = place_of(pass, at);
    const Vec base1 = base_of(job->exponents1[place]);
    one->exp_avg = decoded_signed(job->exp_avg8 + start, base1);
    two->exp_avg = decoded_signed(job->exp_avg8 + start + HALF, base1);
    if (factored)
        return;
    const Vec base2 = base_of(job->exponents2[place]);
    one->exp_avg_sq = decoded_second(job->exp_avg_sq8 + start, base2);
    two->exp_avg_sq = decoded_second(job->exp_avg_sq8 + start + HALF, base2);
}

/* The last step's end, and the codes. Returns 0, with nothing written, if a moment is not
 * finite. */
INLINE int encode(const RowPass *pass, int64_t at, Half *one, Half *two, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at, place = place_of(pass, at);
    uint8_t unused;
    __m128i inverse[2];
    smallest_inverses(one, two, inverse, factored);
    if (__builtin_expect(is_not_finite(_mm_min_epu16(inverse[0], inverse[1])), 0))
        return 0;
    const Vec base1 = put_exponent(inverse[0], ROOM_FIRST, &job->exponents1[place]);
    const Vec base2 =
        put_exponent(inverse[1], ROOM_SECOND, factored ? &unused : &job->exponents2[place]);
    const Keys keys = keys_at(pass, at);
    Coded codes1 = begin_codes(&keys, 0, one, factored);
    Coded codes2 = begin_codes(&keys, 1, two, factored);
    end_step(pass, pass->num_steps - 1, one, two, factored);
    const Vec least = min16(set_sizes(&codes1, base1, base2, factored),
                            set_sizes(&codes2, base1, base2, factored));
    if (__builtin_expect(any_below(least, 16), 0)) {
        const uint32_t exponent = job->exponents1[place];
        lift_codes(&codes1, one->exp_avg, exponent, keys.first, 0, factored);
        lift_codes(&codes2, two->exp_avg, exponent, keys.first, 1, factored);
    }
    store_bytes(job->exp_avg8 + start, first_bytes(&codes1), first_bytes(&codes2));
    if (!factored)
        store_bytes(job->exp_avg_sq8 + start, right16(codes1.size2, 4), right16(codes2.size2, 4));
    put_weights(job, start, keys.weight, one, two);
    return 1;
}

/* Returns 0, with nothing written, for a group with infinities or NaN: its codes may wrap
 * around. */
INLINE int catch_up_group(const RowPass *pass, int64_t at, int dtype, int factored)
{
    const HostJob *job = pass->job;
    const int64_t place = place_of(pass, at);
    Vec former1 = every16(0), former2 = former1;
    Half one = {0}, two = {0};
    if (job->exponents1[place] >= NO_NUMBER - ROOM_FIRST ||
        (!factored && job->exponents2[place] >= NO_NUMBER - ROOM_SECOND))
        return 0;
    decode_moments(pass, at, &one, &two, factored);
    if (job->marks) {
        decode_weights(pass, at, &one, &two);
        const Pair before1 = led(&pass->former, &one, 0, factored);
        const Pair before2 = led(&pass->former, &two, 0, factored);
        former1 = repeatable_words(before1, job->out_dtype);
        former2 = repeatable_words(before2, job->out_dtype);
    }
    if (pass->num_steps)
        begin_step(pass, 0, at, dtype, &one, &two, factored);
    decode_weights(pass, at, &one, &two); /* while roots are taken */
    for (int64_t k = 1; k < pass->num_steps; k++) {
        end_step(pass, k - 1, &one, &two, factored);
        begin_step(pass, k, at, dtype, &one, &two, factored);
    }
    if (pass->num_steps) {
        if (!encode(pass, at, &one, &two, factored))
            return 0;
        if (job->repeatable) {
            decode_moments(pass, at, &one, &two, factored);
            decode_weights(pass, at, &one, &two);
        }
    }
    if (job->out) {
        upload_half(pass, at, &one, former1, factored);
        upload_half(pass, at + HALF, &two, former2, factored);
    }
    return 1;
}

/* Asks for a later group's codes and first gradient: a group is a line or two of each array, which
 * the hardware does not see coming in time. */
INLINE void fetch_ahead(const RowPass *pass, int64_t at, int dtype, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at + AHEAD;
    __builtin_prefetch(job->high + start, 1);
    __builtin_prefetch(job->high + start + HALF, 1);
    __builtin_prefetch(job->low + start, 1);
    __builtin_prefetch(job->exp_avg8 + start, 1);
    if (!factored)
        __builtin_prefetch(job->exp_avg_sq8 + start, 1);
    if (pass->num_steps && dtype == BFLOAT16) {
        const uint16_t *grad = (const uint16_t *)job->steps[0].grad + start;
        __builtin_prefetch(grad, 0);
        __builtin_prefetch(grad + HALF, 0);
    }
}

INLINE void catch_up(const RowPass *pass, int dtype, int factored)
{
    /* Copies, which no store of bytes can change. */
    const HostJob job = *pass->job, former = *pass->former.job;
    RowPass own = *pass;
    const int64_t end = job.cols / GROUP * GROUP;
    own.job = own.upload.job = &job;
    own.former.job = &former;
    for (int64_t at = 0; at < end; at += GROUP) {
        fetch_ahead(&own, at, dtype, factored);
        if (!catch_up_group(&own, at, dtype, factored))
            zenflow_compact_part(pass, at, at + GROUP);
    }
}

/* Functions of their own: in one, the compiler would find fewer registers for each. */
NOINLINE void catch_up_factored(const RowPass *pass, int dtype)
{
    catch_up(pass, dtype, 1);
}

/* Does the row's whole groups, and returns where they end; or nothing, and returns 0. */
INLINE int64_t catch_up_row(const RowPass *pass)
{
    /* Other averages begin from the gradient, or say nothing of the first moment's size. */
    for (int64_t k = 0; k < pass->num_steps; k++)
        if (!(pass->scales[k].one_minus_beta1 < 0.5f && pass->scales[k].one_minus_beta2 > 0.0f))
            return 0;
    if (pass->job->factored)
        catch_up_factored(pass, pass->job->grad_dtype);
    else if (pass->job->grad_dtype == BFLOAT16)
        catch_up(pass, BFLOAT16, 0);
    else
        catch_up(pass, pass->job->grad_dtype, 0);
    return pass->job->cols / GROUP * GROUP;
}

#endif
