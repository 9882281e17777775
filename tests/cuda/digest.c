/* The digests, for the stand-in. Parameters are those of the kernels, in their order. */
#include "digest.cu"

static void run_digest_folds(void **parameters)
{
    digest_folds(ARGUMENT(const Pool, 0), ARGUMENT(const Part *, 1), ARGUMENT(u64 *, 2));
}

static void run_digest_terms(void **parameters)
{
    digest_terms(ARGUMENT(const Pool, 0), ARGUMENT(const Part *, 1), ARGUMENT(const u64 *, 2), ARGUMENT(u64 *, 3));
}

const Kernel digest_kernels[] = {ENTRY(digest_folds), ENTRY(digest_terms), {0}};
