/*
 * A fake for tests: a storage tier in C that keeps values in this process's memory, with a defect if its configuration names one.
 * Batches are carried out inside the call that starts them. Built with -DBARE it lacks the functions that a plugin may lack.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "tier.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

enum {
    MAX_PAGES = 256,
    MAX_BATCHES = 64,
    MAX_VALUE = 64 << 10,
    MAX_REGIONS = 1024,
    /* How late a get is that a later poll carries out, in nanoseconds. */
    LATE = 20000000,
    /* Between two pages that polls carry out one after the other, and between the halves of a value. */
    GAP = 1000000
};

typedef struct {
    bool is_used;
    host_key key;
    uint32_t length;
} slot;

/* A page of a get that a later poll carries out, or the second half of one that is put. */
typedef struct {
    uint64_t due;
    bool is_put;
    host_tier_page page;
    uint64_t tag;
    uint32_t number;
} late_page;

typedef struct {
    pthread_mutex_t lock;
    bool is_closed;
    bool is_read_only;
    int event;
    bool is_signalled;
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

    /* Of defects. */
    char defect[64];
    pthread_t opener;
    uint32_t asked;
    uint64_t cancelled;
    bool was_full;
    size_t late_count;
    late_page late[MAX_PAGES * MAX_BATCHES];
} tier;

static const host_services *services;

/* What this fake can do wrong. */
static const char *const DEFECTS[] = {
    "",
    "allocates-on-get",
    "answers-when-closed",
    "blocks-in-poll",
    "cancels-anything",
    "changes-source",
    "corrupts-value",
    "counts-too-many",
    "crashes",
    "delete-counts",
    "deregister-nothing",
    "deregister-unknown",
    "drops-a-page",
    "event-fd-silent",
    "event-fd-stuck",
    "exists-counts",
    "fills-missing",
    "forgets",
    "forgets-cancelled",
    "half-a-value",
    "ignores-read-only",
    "keys-of-12-bytes",
    "keys-of-31-bytes",
    "leaks-descriptor",
    "leaks-on-get",
    "leaks-on-put",
    "leaks-thread",
    "limits-batches",
    "limits-change",
    "limits-pages",
    "limits-value",
    "loses-batches-of-threads",
    "missing-is-found",
    "never-recovers",
    "never-settled",
    "out-of-bounds",
    "panics",
    "prefix-is-found",
    "region-twice",
    "registers-anything",
    "removes-nothing",
    "repeats-completion",
    "scan-ends-early",
    "scan-never-ends",
    "scan-repeats",
    "scans-from-anywhere",
    "settled-always",
    "settled-early",
    "settled-when-closed",
    "short-is-found",
    "starts-count",
    "stays-open",
    "torn",
    "usage-nothing",
    "writes-eights",
    "writes-past-page",
    "writes-whole-value",
    "wrong-bytes",
    "wrong-page",
};

static void tier_attach(const host_services *given) {
    services = given;
}

static bool is(const tier *self, const char *defect) {
    return strcmp(self->defect, defect) == 0;
}

static int32_t tier_check(host_text role, const host_opening *opening, host_error *error) {
    (void)role;
    const int64_t slots = host_integer(opening, "slots", 512);
    if (slots < 1 || slots > 1 << 16) {
        return host_fail(error, HOST_CONFIG, "slots is %lld, it must be from 1 to 65536", (long long)slots);
    }
    const host_text defect = host_string(opening, "defect");
    for (size_t at = 0; at < sizeof DEFECTS / sizeof *DEFECTS; at++) {
        if (host_text_is(defect, DEFECTS[at])) {
            return 0;
        }
    }
    return host_fail(error, HOST_CONFIG, "defect is \"%.*s\", which this fake does not have", (int)defect.length, defect.data);
}

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void *sleep_for_ever(void *argument) {
    for (;;) {
        pause();
    }
    return argument;
}

static void destroy(tier *self) {
    if (self->event >= 0 && !is(self, "leaks-descriptor")) {
        close(self->event);
    }
    pthread_mutex_destroy(&self->lock);
    free(self->slots);
    free(self->values);
    free(self);
}

static int32_t tier_open(const host_opening *opening, void **instance, host_error *error) {
    const int32_t code = tier_check((host_text){"tier", 4}, opening, error);
    if (code != 0) {
        return code;
    }
    tier *self = calloc(1, sizeof *self);
    const size_t slots = (size_t)host_integer(opening, "slots", 512);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    pthread_mutex_init(&self->lock, NULL);
    self->slots = calloc(slots, sizeof *self->slots);
    self->values = calloc(slots, MAX_VALUE);
    self->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->slots == NULL || self->values == NULL || self->event < 0) {
        const bool is_full = self->event >= 0;
        const int why = errno;
        destroy(self);
        return is_full ? host_fail(error, HOST_NO_RESOURCE, "there is no memory for %zu values", slots)
                       : host_fail(error, HOST_IO, "cannot make a descriptor for events: %s", strerror(why));
    }
    self->slots_count = slots;
    self->next_region = 1;
    self->opener = pthread_self();
    self->is_read_only = host_integer(opening, "read_only", false) != 0;
    const host_text defect = host_string(opening, "defect");
    memcpy(self->defect, defect.data, defect.length);
    pthread_t thread;
    if (is(self, "leaks-thread") && pthread_create(&thread, NULL, sleep_for_ever, NULL) == 0) {
        pthread_detach(thread);
    }
    host_log(services, HOST_LOG_INFO, "tier", "%zu values fit", slots);
    *instance = self;
    return 0;
}

static void tier_close(void *instance) {
    destroy(instance);
}

static void tier_limits(void *instance, host_tier_limits *limits) {
    tier *self = instance;
    *limits = (host_tier_limits){.max_pages = MAX_PAGES, .max_batches = MAX_BATCHES, .max_value = MAX_VALUE, .alignment = 1};
    if (is(self, "limits-pages")) {
        limits->max_pages *= 2;
    } else if (is(self, "limits-value")) {
        limits->max_value *= 2;
    } else if (is(self, "limits-change")) {
        limits->max_batches -= __atomic_fetch_add(&self->asked, 1, __ATOMIC_RELAXED) % 2;
    }
}

static int32_t closed(host_error *error) {
    return host_fail(error, HOST_CLOSED, "the instance was shut down");
}

static int32_t add_region(tier *self, const host_memory *memory, uint32_t *region, host_error *error) {
    if (self->is_closed) {
        return closed(error);
    }
    if (memory->kind != HOST_DRAM) {
        if (is(self, "registers-anything")) {
            *region = UINT32_MAX;
            return 0;
        }
        return host_fail(error, HOST_UNSUPPORTED, "only host memory can be registered");
    }
    const uint64_t start = (uint64_t)(uintptr_t)memory->address;
    if (start == 0 || memory->length == 0 || start + memory->length < start) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
    }
    if (self->regions_count == MAX_REGIONS) {
        return host_fail(error, HOST_NO_RESOURCE, "%d regions are registered", MAX_REGIONS);
    }
    self->regions[self->regions_count].id = is(self, "region-twice") ? 1 : self->next_region;
    self->regions[self->regions_count].memory = *memory;
    *region = self->regions[self->regions_count].id;
    self->next_region++;
    self->regions_count++;
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
        code = is(self, "deregister-unknown") ? 0 : host_fail(error, HOST_INVALID_ARGUMENT, "no region has the id %u", region);
    } else if (!is(self, "deregister-nothing")) {
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
                              (page->length <= memory->length - page->offset || is(self, "out-of-bounds"));
            return fits ? (uint8_t *)memory->address + page->offset : NULL;
        }
    }
    return NULL;
}

static bool is_same(const tier *self, const host_key *one, const host_key *other) {
    if (is(self, "keys-of-12-bytes")) {
        return memcmp(one, other, 12) == 0;
    }
    const size_t first = is(self, "keys-of-31-bytes");
    return memcmp((const uint8_t *)one + first, (const uint8_t *)other + first, sizeof *one - first) == 0;
}

/* The slot of a key, or that where the next one goes; `slots_count` when it is full. */
static size_t find(const tier *self, const host_key *key, bool *is_there) {
    size_t unused = self->slots_count;
    for (size_t at = 0; at < self->slots_count; at++) {
        if (!self->slots[at].is_used) {
            unused = unused < at ? unused : at;
        } else if (is_same(self, &self->slots[at].key, key)) {
            *is_there = true;
            return at;
        }
    }
    *is_there = false;
    return unused;
}

/* Opens a descriptor that nothing closes. */
static void leak(const tier *self, const char *defect) {
    if (is(self, defect)) {
        (void)!dup(self->event);
    }
}

static int32_t get_one(tier *self, const host_tier_page *page, uint64_t *bytes) {
    bool is_there;
    leak(self, "leaks-on-get");
    uint8_t *to = place(self, page);
    const size_t at = find(self, &page->key, &is_there);
    if (to == NULL) {
        return HOST_INVALID_ARGUMENT;
    }
    if (!is_there) {
        if (is(self, "fills-missing")) {
            memset(to, 0, page->length);
        }
        return is(self, "missing-is-found") ? HOST_FOUND : HOST_MISSING;
    }
    const uint32_t length = self->slots[at].length;
    if (length > page->length && is(self, "prefix-is-found")) {
        memcpy(to, self->values + at * MAX_VALUE, page->length);
        return HOST_FOUND;
    }
    if (length != page->length && !(is(self, "short-is-found") && length < page->length)) {
        const host_tier_page whole = {.region = page->region, .offset = page->offset, .length = length};
        if (is(self, "writes-whole-value") && place(self, &whole) != NULL) {
            memcpy(to, self->values + at * MAX_VALUE, length);
        }
        return HOST_INVALID_ARGUMENT;
    }
    memcpy(to, self->values + at * MAX_VALUE, is(self, "half-a-value") ? length / 2 : length);
    to[0] ^= is(self, "corrupts-value");
    const host_tier_page longer = {.region = page->region, .offset = page->offset, .length = length + 1};
    if (is(self, "writes-past-page") && place(self, &longer) != NULL) {
        to[length]++;
    }
    const uint32_t more = (8 - length % 8) % 8;
    const host_tier_page eights = {.region = page->region, .offset = page->offset, .length = length + more};
    if (is(self, "writes-eights") && place(self, &eights) != NULL) {
        memset(to + length, 0, more);
    }
    *bytes = is(self, "wrong-bytes") ? length + 1 : length;
    return HOST_FOUND;
}

static int32_t put_one(tier *self, const host_tier_page *page, uint64_t *bytes) {
    bool is_there;
    uint8_t *from = place(self, page);
    const size_t at = find(self, &page->key, &is_there);
    leak(self, "leaks-on-put");
    if (from == NULL) {
        return HOST_INVALID_ARGUMENT;
    }
    if (self->is_read_only && !is(self, "ignores-read-only")) {
        return HOST_UNSUPPORTED;
    }
    if (!is_there) {
        if (at == self->slots_count) {
            return HOST_NO_RESOURCE;
        }
        memcpy(self->values + at * MAX_VALUE, from, is(self, "torn") ? page->length / 2 : page->length);
        from[0] ^= is(self, "changes-source");
        self->slots[at] = (slot){.is_used = !is(self, "forgets"), .key = page->key, .length = page->length};
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
    if (removes && self->is_read_only && !is(self, "ignores-read-only")) {
        return HOST_UNSUPPORTED;
    }
    *bytes = self->slots[at].length + (is(self, removes ? "delete-counts" : "exists-counts") ? 24 : 0);
    if (removes && !is(self, "removes-nothing")) {
        self->slots[at].is_used = false;
    }
    return HOST_FOUND;
}

enum operation { EXISTS, GET, PUT, REMOVE };

/* Queues a completion, and says so. */
static void complete(tier *self, host_tier_completion done) {
    const size_t room = sizeof self->done / sizeof *self->done;
    if (is(self, "wrong-page")) {
        done.page++;
    }
    self->done[(self->first + self->waiting++) % room] = done;
    if (!self->is_signalled && !is(self, "event-fd-silent")) {
        const uint64_t one = 1;
        self->is_signalled = write(self->event, &one, sizeof one) == sizeof one;
    }
}

/* Whether gets are carried out late, by polls. */
static bool defers(const tier *self) {
    return is(self, "settled-always") || is(self, "settled-early") || is(self, "deregister-nothing");
}

/* Stores the second half of a value. */
static int32_t put_rest(tier *self, const host_tier_page *page, uint64_t *bytes) {
    bool is_there;
    const uint8_t *from = place(self, page);
    const size_t at = find(self, &page->key, &is_there);
    if (from == NULL || !is_there) {
        return HOST_INVALID_ARGUMENT;
    }
    const uint32_t half = page->length / 2;
    memcpy(self->values + at * MAX_VALUE + half, from + half, page->length - half);
    *bytes = page->length;
    return HOST_STORED;
}

/* Carries out what is due. */
static void catch_up(tier *self) {
    const uint64_t now = nanoseconds();
    size_t kept = 0;
    for (size_t at = 0; at < self->late_count; at++) {
        const late_page of = self->late[at];
        if (of.due > now) {
            self->late[kept++] = of;
        } else {
            host_tier_completion done = {.tag = of.tag, .page = of.number};
            done.status = of.is_put ? put_rest(self, &of.page, &done.bytes) : get_one(self, &of.page, &done.bytes);
            complete(self, done);
        }
    }
    self->late_count = kept;
}

static int32_t batch(tier *self, uint64_t tag, enum operation what, const void *items, size_t count) {
    if (what == GET && is(self, "allocates-on-get")) {
        void *volatile memory = malloc(count + 1);
        free(memory);
    }
    if (what == PUT && count == 0 && is(self, "crashes")) {
        abort();
    }
    if (is(self, "loses-batches-of-threads") && !pthread_equal(self->opener, pthread_self())) {
        return 0;
    }
    pthread_mutex_lock(&self->lock);
    int32_t code = 0;
    const size_t most = sizeof self->done / sizeof *self->done;
    if (self->is_closed) {
        code = is(self, "answers-when-closed") ? 0 : HOST_CLOSED;
    } else if (count == 0 || count > MAX_PAGES) {
        code = is(self, "panics") && count == 0 ? HOST_PANICKED : HOST_INVALID_ARGUMENT;
    } else if (self->waiting + self->late_count + count > most || (is(self, "never-recovers") && self->was_full) ||
               (is(self, "limits-batches") && self->waiting >= MAX_BATCHES / 2)) {
        self->was_full = true;
        code = HOST_WOULD_BLOCK;
    } else {
        code = is(self, "starts-count") ? (int32_t)count : 0;
        for (size_t page = 0; page < count; page++) {
            host_tier_completion done = {.tag = tag, .page = (uint32_t)page};
            const host_tier_page *pages = items;
            const host_key *keys = items;
            if (what == GET && defers(self)) {
                const uint64_t wait = is(self, "settled-early") ? (self->late_count + 1) * GAP : LATE;
                self->late[self->late_count++] = (late_page){nanoseconds() + wait, false, pages[page], tag, (uint32_t)page};
                continue;
            }
            switch (what) {
            case GET: done.status = get_one(self, &pages[page], &done.bytes); break;
            case PUT: done.status = put_one(self, &pages[page], &done.bytes); break;
            case EXISTS:
            case REMOVE: done.status = look(self, &keys[page], what == REMOVE, &done.bytes); break;
            }
            if (what == PUT && is(self, "torn") && done.status == HOST_STORED) {
                self->late[self->late_count++] = (late_page){nanoseconds() + GAP, true, pages[page], tag, (uint32_t)page};
                continue;
            }
            if (is(self, "drops-a-page") && page > 0 && page == count - 1) {
                break;
            }
            complete(self, done);
            if (is(self, "repeats-completion") && page > 0 && page == count - 1 && self->waiting < most) {
                complete(self, done);
            }
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
    catch_up(self);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && self->waiting > 0) {
        completions[count] = self->done[self->first];
        count += !(is(self, "forgets-cancelled") && self->cancelled == self->done[self->first].tag);
        self->first = (self->first + 1) % (sizeof self->done / sizeof *self->done);
        self->waiting--;
    }
    if (self->is_signalled && self->waiting == 0 && !is(self, "event-fd-stuck")) {
        uint64_t counter;
        self->is_signalled = read(self->event, &counter, sizeof counter) != sizeof counter;
    }
    if (is(self, "counts-too-many") && count > 0) {
        count = (int32_t)room + 1;
    }
    pthread_mutex_unlock(&self->lock);
    if (count == 0 && is(self, "blocks-in-poll")) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return count;
}

#ifndef BARE
static int32_t tier_cancel(void *instance, uint64_t tag) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    self->cancelled = tag;
    /* Everything has ended by the time that a batch is accepted. */
    const int32_t code = self->is_closed ? HOST_CLOSED : is(self, "cancels-anything") ? 0 : HOST_INVALID_ARGUMENT;
    pthread_mutex_unlock(&self->lock);
    return code;
}
#endif

static int32_t tier_settled(void *instance, uint64_t tag) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    bool has_begun = true;
    for (size_t at = 0; is(self, "settled-early") && at < self->late_count; at++) {
        has_begun = has_begun && !(self->late[at].tag == tag && self->late[at].number == 0);
    }
    const bool is_closed = self->is_closed && !is(self, "settled-when-closed");
    const int32_t answer = is_closed ? HOST_CLOSED : is(self, "never-settled") || !has_begun ? 0 : 1;
    pthread_mutex_unlock(&self->lock);
    return answer;
}

#ifndef BARE
static int32_t tier_scan(
    void *instance, uint64_t cursor, host_key *keys, size_t room, host_scanned *scanned, host_error *error) {
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t code = 0;
    if (self->is_closed) {
        code = closed(error);
    } else if (cursor > self->slots_count && is(self, "scans-from-anywhere")) {
        *scanned = (host_scanned){.cursor = 0};
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
        scanned->cursor = at < self->slots_count && !is(self, "scan-ends-early") ? at : 0;
        if (is(self, "scan-repeats") && scanned->keys > 1) {
            keys[1] = keys[0];
        }
        if (is(self, "scan-never-ends")) {
            *scanned = (host_scanned){.cursor = 1};
        }
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
        usage->bytes += self->slots[at].is_used && !is(self, "usage-nothing") ? self->slots[at].length : 0;
    }
    usage->capacity = self->slots_count * (uint64_t)MAX_VALUE;
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t tier_event_fd(void *instance) {
    return ((const tier *)instance)->event;
}
#endif

static int32_t tier_shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    (void)deadline_ms;
    (void)error;
    tier *self = instance;
    pthread_mutex_lock(&self->lock);
    self->is_closed = !is(self, "stays-open");
    pthread_mutex_unlock(&self->lock);
    return 0;
}

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
#ifndef BARE
    .cancel = tier_cancel,
    .scan = tier_scan,
    .usage = tier_usage,
    .event_fd = tier_event_fd,
#endif
    .shutdown = tier_shutdown,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = tier_attach,
    .check_config = tier_check,
    .tier = &role,
};
