/*
 * For benchmarks: adds up what it is given and looks whether each entry is valid, which is less than any plugin does with it. So
 * what is measured is the call. `plugin-api/benches/languages.rs` has the same in Rust.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "sums.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

typedef struct {
    /* Stored, so that no compiler drops the work. */
    atomic_uint_fast64_t sum;
} sums;

static int32_t make(void **instance, host_error *error) {
    sums *self = calloc(1, sizeof *self);
    *instance = self;
    return self != NULL ? 0 : host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
}

static int32_t keep(void *instance, uint64_t sum) {
    sums *self = instance;
    atomic_store_explicit(&self->sum, sum, memory_order_relaxed);
    return 0;
}

static int32_t sums_open(const host_opening *opening, void **instance, host_error *error) {
    (void)opening;
    return make(instance, error);
}

static int32_t pool_open(const host_pool_opening *opening, void **instance, host_error *error) {
    (void)opening;
    return make(instance, error);
}

static void sums_close(void *instance) {
    free(instance);
}

static int32_t sums_register(void *instance, const host_memory *memory, uint32_t *region, host_error *error) {
    (void)instance, (void)memory, (void)error;
    *region = 1;
    return 0;
}

static int32_t nothing_about(void *instance, uint32_t id, host_error *error) {
    (void)instance, (void)id, (void)error;
    return 0;
}

static int32_t sums_settled(void *instance, uint64_t tag) {
    (void)instance, (void)tag;
    return 1;
}

static int32_t sums_shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    (void)instance, (void)deadline_ms, (void)error;
    return 0;
}

static void transfer_limits(void *instance, host_transfer_limits *limits) {
    (void)instance;
    *limits = (host_transfer_limits){.max_writes = UINT32_MAX, .max_submissions = UINT32_MAX};
}

static int32_t transfer_endpoint(void *instance, uint8_t *bytes, size_t room, size_t *length, host_error *error) {
    (void)instance, (void)bytes, (void)room, (void)error;
    *length = 0;
    return 0;
}

static int32_t transfer_connect(
    void *instance, host_text name, const uint8_t *endpoint, size_t length, uint32_t *peer, host_error *error) {
    (void)instance, (void)name, (void)endpoint, (void)length, (void)error;
    *peer = 1;
    return 0;
}

static int32_t transfer_submit(void *instance, const host_submission *submission, const host_write *writes, size_t count) {
    (void)submission;
    uint64_t bytes = 0;
    for (size_t at = 0; at < count; at++) {
        if (writes[at].length == 0 || writes[at].target_region == UINT32_MAX) {
            return HOST_INVALID_ARGUMENT;
        }
        bytes += writes[at].length;
    }
    return keep(instance, bytes);
}

static int32_t transfer_poll(void *instance, host_completion *completions, size_t room) {
    (void)instance, (void)completions, (void)room;
    return 0;
}

static int32_t transfer_notifications(void *instance, host_notification *notifications, size_t room) {
    (void)instance, (void)notifications, (void)room;
    return 0;
}

static void tier_limits(void *instance, host_tier_limits *limits) {
    (void)instance;
    *limits = (host_tier_limits){.max_pages = 4096, .max_batches = 64, .max_value = 1 << 20, .alignment = 1};
}

static int32_t tier_keys(void *instance, uint64_t tag, const host_key *keys, size_t count) {
    (void)tag;
    uint64_t sum = 0;
    for (size_t at = 0; at < count; at++) {
        sum += ((const uint8_t *)&keys[at])[0];
    }
    return keep(instance, sum);
}

static int32_t tier_pages(void *instance, uint64_t tag, const host_tier_page *pages, size_t count) {
    (void)tag;
    uint64_t bytes = 0;
    for (size_t at = 0; at < count; at++) {
        if (pages[at].length == 0 || pages[at].region == UINT32_MAX) {
            return HOST_INVALID_ARGUMENT;
        }
        bytes += pages[at].length;
    }
    return keep(instance, bytes);
}

static int32_t tier_poll(void *instance, host_tier_completion *completions, size_t room) {
    (void)instance, (void)completions, (void)room;
    return 0;
}

static int32_t pool_components(void *instance, host_component *components, size_t room) {
    (void)instance;
    if (room < 1) {
        return HOST_INVALID_ARGUMENT;
    }
    components[0] = (host_component){.pages = 4096};
    return 1;
}

static int32_t pool_take(void *instance, uint32_t component, uint32_t *pages, size_t count) {
    (void)component;
    for (size_t at = 0; at < count; at++) {
        pages[at] = (uint32_t)at;
    }
    return keep(instance, count);
}

static int32_t pool_give(void *instance, uint32_t component, const uint32_t *pages, size_t count) {
    (void)component;
    uint64_t sum = 0;
    for (size_t at = 0; at < count; at++) {
        if (pages[at] == UINT32_MAX) {
            return HOST_INVALID_ARGUMENT;
        }
        sum += pages[at];
    }
    return keep(instance, sum);
}

static const host_transfer_role transfer = {
    .size = sizeof transfer,
    .open = sums_open,
    .close = sums_close,
    .limits = transfer_limits,
    .register_memory = sums_register,
    .deregister_memory = nothing_about,
    .endpoint = transfer_endpoint,
    .connect = transfer_connect,
    .disconnect = nothing_about,
    .submit = transfer_submit,
    .poll = transfer_poll,
    .notifications = transfer_notifications,
    .settled = sums_settled,
    .shutdown = sums_shutdown,
};

static const host_tier_role tier = {
    .size = sizeof tier,
    .open = sums_open,
    .close = sums_close,
    .limits = tier_limits,
    .register_memory = sums_register,
    .deregister_memory = nothing_about,
    .exists = tier_keys,
    .get = tier_pages,
    .put = tier_pages,
    .remove = tier_keys,
    .poll = tier_poll,
    .settled = sums_settled,
    .shutdown = sums_shutdown,
};

static const host_allocator_role allocator = {
    .size = sizeof allocator,
    .open = pool_open,
    .close = sums_close,
    .components = pool_components,
    .take = pool_take,
    .give = pool_give,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .transfer = &transfer,
    .tier = &tier,
    .allocator = &allocator,
};
