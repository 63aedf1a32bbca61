/* Whole groups of compact state by AVX2. */
#include "compact.h"

#if defined(HAS_CLONES)
#pragma GCC target("avx2")
#pragma GCC optimize("no-tree-slp-vectorize") /* it packs single keys by slow inserts */
#include "compact_256.h"

#include "compact_wide.h"

int64_t zenflow_compact_256(const RowPass *pass)
{
    return catch_up_row(pass);
}
#endif
