/* A row's pass over compact state. compact.c begins it, and compact_wide.h does its
 * whole groups where there is AVX2 or AVX-512. */
#ifndef ZENFLOW_HOST_COMPACT_H
#define ZENFLOW_HOST_COMPACT_H

#include "arithmetic.h"

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

/* An upload's job, and its constants where it leads: else null. */
typedef struct {
    const HostJob *job;
    const Scales *scales;
} RowUpload;

typedef struct {
    const HostJob *job;
    int64_t row;
    int64_t num_steps;
    const Scales *scales; /* of each step */
    RowUpload upload;
    RowUpload former; /* the upload before, where there are marks */
    Keys keys;        /* of the row's first element */
} RowPass;

/* Exponent of infinities and NaN. */
enum { NO_NUMBER = 255 };

INLINE uint32_t exponent_of(uint32_t exponent, uint32_t room)
{
    return exponent > room ? exponent - room : 0;
}

/* Place of a group's exponent bytes. */
INLINE int64_t place_of(const RowPass *pass, int64_t at)
{
    return pass->row * ((pass->job->cols + GROUP - 1) / GROUP) + at / GROUP;
}

/* Whether the upload's displacement is that of the last step. */
INLINE int repeats_last(const RowPass *pass)
{
    return pass->num_steps && pass->job->repeats_last && !pass->job->repeatable;
}

/* Does elements begin..end-1 of the row; begin is a multiple of GROUP, end too or the row's. */
void zenflow_compact_part(const RowPass *pass, int64_t begin, int64_t end);

#if defined(HAS_CLONES)
/* Do the row's whole groups, and return where they end; or nothing, and return 0. One needs AVX-512
 * as x86-64-v4 has it, the other AVX2. */
int64_t zenflow_compact_512(const RowPass *pass);
int64_t zenflow_compact_256(const RowPass *pass);
#endif

#endif
