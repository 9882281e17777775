/* The kernels that copy pages, for the stand-in. */
#include "page_copy.cu"

#define RUN(name)                                                                                                      \
    static void run_##name(void **parameters) { name(ARGUMENT(const PageCopy, 0)); }

RUN(page_copy_16)
RUN(page_copy_8)
RUN(page_copy_4)
RUN(page_copy_2)
RUN(page_copy_1)

const Kernel page_copy_kernels[] = {ENTRY(page_copy_16), ENTRY(page_copy_8), ENTRY(page_copy_4),
                                    ENTRY(page_copy_2),  ENTRY(page_copy_1), {0}};
