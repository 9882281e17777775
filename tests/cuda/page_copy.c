/* The kernels that copy pages, for the stand-in. */
#include "page_copy.cu"

KERNEL(page_copy_16, const PageCopy)
KERNEL(page_copy_8, const PageCopy)
KERNEL(page_copy_4, const PageCopy)
KERNEL(page_copy_2, const PageCopy)
KERNEL(page_copy_1, const PageCopy)

const Kernel page_copy_kernels[] = {ENTRY(page_copy_16), ENTRY(page_copy_8), ENTRY(page_copy_4),
                                    ENTRY(page_copy_2),  ENTRY(page_copy_1), {0}};
