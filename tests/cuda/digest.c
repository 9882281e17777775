/* The digests, for the stand-in. Parameters are those of the kernels, in their order. */
#include "digest.cu"

KERNEL(digest_long, const Pool, const Part *, u64 *)
KERNEL(digest_rest, const Pool, const Part *, const u32, u64 *)

const Kernel digest_kernels[] = {ENTRY(digest_long), ENTRY(digest_rest), {0}};
