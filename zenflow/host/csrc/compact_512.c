/* Whole groups of compact state by AVX-512. */
#include "compact.h"

#if defined(HAS_CLONES)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC optimize("no-tree-slp-vectorize") /* it packs single keys by slow inserts */
#include "compact_512.h"

#include "compact_wide.h"

int64_t zenflow_compact_512(const RowPass *pass)
{
    return catch_up_row(pass);
}
#endif
