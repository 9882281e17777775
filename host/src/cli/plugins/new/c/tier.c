/*
 * A storage tier that keeps values in this process's memory.
 *
 * Batches are carried out inside the call that starts them, which keeps the example short. A real tier queues them, lets a thread or
 * the network finish them, and reports each page from tier_poll().
 *
 * To make it yours: get_one(), put_one() and look() are where your storage goes. As soon as they take longer than a copy, let batch()
 * only queue the pages, in memory that was allocated when the tier opened, and let a thread write the completions.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

// One head of a page of a large model has less than 1 MiB. Memory for a value is taken when it is first stored.
enum { MAX_PAGES = 256, MAX_BATCHES = 64, MAX_VALUE = 2 << 20, MAX_REGIONS = 1024 };

typedef struct {
    bool is_used;
    host_key key;
    uint32_t length;
} slot;

typedef struct {
    pthread_mutex_t lock;
    bool is_closed;
    uint32_t next_region;
    uint32_t regions_count;
    struct {
        uint32_t id;
        host_memory memory;
    } regions[MAX_REGIONS];
    size_t slots_count;
    slot *slots;
    uint8_t *values;
    /* A ring. */
    host_tier_completion done[MAX_PAGES * MAX_BATCHES];
    size_t first;
    size_t waiting;
} tier;

static const host_services *services;

static void tier_attach(const host_services *given) {
    services = given;
}

static int32_t tier_check(host_text role, const host_opening *opening, host_error *error) {
    (void)role;
    const int64_t slots = host_integer(opening, "slots", 512);
    if (slots < 1 || slots > 1 << 16) {
        return host_fail(error, HOST_CONFIG, "slots is %lld, it must be from 1 to 65536", (long long)slots);
    }
    return 0;
}

static int32_t tier_open(const host_opening *opening, void **instance, host_error *error) {
    const int32_t code = tier_check((host_text){"tier", 4}, opening, error);
    if (code != 0) {
        return code;
    }
    tier *self = calloc(1, sizeof *self);
    const size_t slots = (size_t)host_integer(opening, "slots", 512);
    if (self != NULL) {
        self->slots = calloc(slots, sizeof *self->slots);
        self->values = calloc(slots, MAX_VALUE);
    }
    if (self == NULL || self->slots == NULL || self->values == NULL) {
        if (self != NULL) {
            free(self->slots);
            free(self->values);
        }
        free(self);
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for %zu values", slots);
    }
    pthread_mutex_init(&self->lock, NULL);
    self->slots_count = slots;
    self->next_region = 1;
    host_log(services, HOST_LOG_INFO, "tier", "%zu values fit", slots);
    *instance = self;
    return 0;
}

static void tier_close(void *instance) {
    tier *self = instance;
    pthread_mutex_destroy(&self->lock);
    free(self->slots);
    free(self->values);
    free(self);
}

static void tier_limits(void *instance, host_tier_limits *limits) {
    (void)instance;
    *limits = (host_tier_limits){.max_pages = MAX_PAGES, .max_batches = MAX_BATCHES, .max_value = MAX_VALUE, .alignment = 1};
}

static int32_t closed(host_error *error) {
    return host_fail(error, HOST_CLOSED, "the instance was shut down");
}

static int32_t add_region(tier *self, const host_memory *memory, uint32_t *region, host_error *error) {
    if (self->is_closed) {
        return closed(error);
    }
    if (memory->kind != HOST_DRAM) {
        return host_fail(error, HOST_UNSUPPORTED, "only host memory can be registered");
    }
    const uint64_t start = (uint64_t)(uintptr_t)memory->address;
    if (start == 0 || memory->length == 0 || start + memory->length < start) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
    }
    if (self->regions_count == MAX_REGIONS) {
        return host_fail(error, HOST_NO_RESOURCE, "%d regions are registered", MAX_REGIONS);
    }
    *region = self->next_region++;
    self->regions[self->regions_count].id = *region;
    self->regions[self->regions_count++].memory = *memory;
    return 0;
}

static int32_t tier_register(void *instance, const host_memory *memory, uint32_t *region, host_error *error) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    const int32_t code = add_region(self, memory, region, error);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t tier_deregister(void *instance, uint32_t region, host_error *error) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t code = 0;
    uint32_t at = 0;
    while (at < self->regions_count && self->regions[at].id != region) {
        at++;
    }
    if (self->is_closed) {
        code = closed(error);
    } else if (at == self->regions_count) {
        code = host_fail(error, HOST_INVALID_ARGUMENT, "no region has the id %u", region);
    } else {
        self->regions[at] = self->regions[--self->regions_count];
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

/* Where a page lies, or NULL when that is not inside its region. */
static uint8_t *place(tier *self, const host_tier_page *page) {
    for (uint32_t at = 0; at < self->regions_count; at++) {
        const host_memory *memory = &self->regions[at].memory;
        if (self->regions[at].id == page->region) {
            const bool fits = page->length > 0 && page->length <= MAX_VALUE && page->offset <= memory->length &&
                              page->length <= memory->length - page->offset;
            return fits ? (uint8_t *)memory->address + page->offset : NULL;
        }
    }
    return NULL;
}

/* The slot of a key, or that where the next one goes; `slots_count` when it is full. */
static size_t find(const tier *self, const host_key *key, bool *is_there) {
    size_t unused = self->slots_count;
    for (size_t at = 0; at < self->slots_count; at++) {
        if (!self->slots[at].is_used) {
            unused = unused < at ? unused : at;
        } else if (memcmp(&self->slots[at].key, key, sizeof *key) == 0) {
            *is_there = true;
            return at;
        }
    }
    *is_there = false;
    return unused;
}

static int32_t get_one(tier *self, const host_tier_page *page, uint64_t *bytes) {
    bool is_there;
    uint8_t *to = place(self, page);
    const size_t at = find(self, &page->key, &is_there);
    if (to == NULL) {
        return HOST_INVALID_ARGUMENT;
    }
    if (!is_there) {
        return HOST_MISSING;
    }
    if (self->slots[at].length != page->length) {
        return HOST_INVALID_ARGUMENT;
    }
    memcpy(to, self->values + at * MAX_VALUE, page->length);
    *bytes = page->length;
    return HOST_FOUND;
}

static int32_t put_one(tier *self, const host_tier_page *page, uint64_t *bytes) {
    bool is_there;
    const uint8_t *from = place(self, page);
    const size_t at = find(self, &page->key, &is_there);
    if (from == NULL) {
        return HOST_INVALID_ARGUMENT;
    }
    if (!is_there) {
        if (at == self->slots_count) {
            return HOST_NO_RESOURCE;
        }
        memcpy(self->values + at * MAX_VALUE, from, page->length);
        self->slots[at] = (slot){.is_used = true, .key = page->key, .length = page->length};
    }
    *bytes = self->slots[at].length;
    return HOST_STORED;
}

static int32_t look(tier *self, const host_key *key, bool removes, uint64_t *bytes) {
    bool is_there;
    const size_t at = find(self, key, &is_there);
    if (!is_there) {
        return HOST_MISSING;
    }
    *bytes = self->slots[at].length;
    if (removes) {
        self->slots[at].is_used = false;
    }
    return HOST_FOUND;
}

enum operation { EXISTS, GET, PUT, REMOVE };

static int32_t batch(tier *self, uint64_t tag, enum operation what, const void *items, size_t count) {
    pthread_mutex_lock(&self->lock);
    int32_t code = 0;
    if (self->is_closed) {
        code = HOST_CLOSED;
    } else if (count == 0 || count > MAX_PAGES) {
        code = HOST_INVALID_ARGUMENT;
    } else if (self->waiting + count > sizeof self->done / sizeof *self->done) {
        code = HOST_WOULD_BLOCK;
    } else {
        for (size_t page = 0; page < count; page++) {
            host_tier_completion done = {.tag = tag, .page = (uint32_t)page};
            const host_tier_page *pages = items;
            const host_key *keys = items;
            switch (what) {
            case GET: done.status = get_one(self, &pages[page], &done.bytes); break;
            case PUT: done.status = put_one(self, &pages[page], &done.bytes); break;
            case EXISTS:
            case REMOVE: done.status = look(self, &keys[page], what == REMOVE, &done.bytes); break;
            }
            const size_t room = sizeof self->done / sizeof *self->done;
            self->done[(self->first + self->waiting++) % room] = done;
        }
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t tier_exists(void *instance, uint64_t tag, const host_key *keys, size_t count) {
    return batch(instance, tag, EXISTS, keys, count);
}

static int32_t tier_get(void *instance, uint64_t tag, const host_tier_page *pages, size_t count) {
    return batch(instance, tag, GET, pages, count);
}

static int32_t tier_put(void *instance, uint64_t tag, const host_tier_page *pages, size_t count) {
    return batch(instance, tag, PUT, pages, count);
}

static int32_t tier_remove(void *instance, uint64_t tag, const host_key *keys, size_t count) {
    return batch(instance, tag, REMOVE, keys, count);
}

static int32_t tier_poll(void *instance, host_tier_completion *completions, size_t room) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && self->waiting > 0) {
        completions[count++] = self->done[self->first];
        self->first = (self->first + 1) % (sizeof self->done / sizeof *self->done);
        self->waiting--;
    }
    pthread_mutex_unlock(&self->lock);
    return count;
}

static int32_t tier_settled(void *instance, uint64_t tag) {
    (void)tag;
    tier *self = instance;
    /* Everything has ended by the time that a batch is accepted. */
    pthread_mutex_lock(&self->lock);
    const int32_t answer = self->is_closed ? HOST_CLOSED : 1;
    pthread_mutex_unlock(&self->lock);
    return answer;
}

static int32_t tier_scan(
    void *instance, uint64_t cursor, host_key *keys, size_t room, host_scanned *scanned, host_error *error) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t code = 0;
    if (self->is_closed) {
        code = closed(error);
    } else if (cursor > self->slots_count) {
        code = host_fail(error, HOST_INVALID_ARGUMENT, "no scan gave out this cursor");
    } else {
        uint64_t at = cursor;
        while (at < self->slots_count && scanned->keys < room) {
            if (self->slots[at].is_used) {
                keys[scanned->keys++] = self->slots[at].key;
            }
            at++;
        }
        scanned->cursor = at < self->slots_count ? at : 0;
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t tier_usage(void *instance, host_tier_usage *usage, host_error *error) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    const int32_t code = self->is_closed ? closed(error) : 0;
    for (size_t at = 0; at < self->slots_count; at++) {
        usage->values += self->slots[at].is_used;
        usage->bytes += self->slots[at].is_used ? self->slots[at].length : 0;
    }
    usage->capacity = self->slots_count * (uint64_t)MAX_VALUE;
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t tier_shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    (void)deadline_ms;
    (void)error;
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    self->is_closed = true;
    pthread_mutex_unlock(&self->lock);
    return 0;
}

/* Without cancel nothing is cancelled before it starts; without event_fd the host polls on a timer. */
static const host_tier_role role = {
    .size = sizeof role,
    .open = tier_open,
    .close = tier_close,
    .limits = tier_limits,
    .register_memory = tier_register,
    .deregister_memory = tier_deregister,
    .exists = tier_exists,
    .get = tier_get,
    .put = tier_put,
    .remove = tier_remove,
    .poll = tier_poll,
    .settled = tier_settled,
    .scan = tier_scan,
    .usage = tier_usage,
    .shutdown = tier_shutdown,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = tier_attach,
    .check_config = tier_check,
    .tier = &role,
};
