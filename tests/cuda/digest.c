/* The digests, for the stand-in. Parameters are those of the kernels, in their order. */
#include "digest.cu"

KERNEL(digest_folds, const Pool, const Part *, u64 *)
KERNEL(digest_terms, const Pool, const Part *, const u64 *, u64 *)

const Kernel digest_kernels[] = {ENTRY(digest_folds), ENTRY(digest_terms), {0}};
