/*
 * A fake for tests: an allocator in C with one free list, and with a defect if its configuration names one.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "allocator.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

enum { MAX_COMPONENTS = 16, UNUSED = 0xFF };

typedef struct {
    pthread_mutex_t lock;
    host_component components[MAX_COMPONENTS];
    uint32_t count;
    /* By component: pool pages that a page of it is made of, and those that it may still take. */
    uint32_t parts[MAX_COMPONENTS];
    uint64_t left[MAX_COMPONENTS];
    uint32_t pages;
    /* A stack of the pages that are free. */
    uint32_t *unused;
    uint32_t unused_count;
    /* By page: the place of the component that has it, or UNUSED. */
    uint8_t *owners;

    /* Of defects. */
    char defect[64];
    pthread_t opener;
    uint32_t last;
    bool has_last;
    uint32_t asked;
} allocator;

static const host_services *services;

/* What this fake can do wrong. */
static const char *const DEFECTS[] = {
    "",
    "accepts-double-free",
    "allocates-on-give",
    "allocates-on-take",
    "any-component",
    "beyond-the-pool",
    "budget-of-none",
    "budget-too-large",
    "components-change",
    "components-count",
    "components-without-room",
    "crashes",
    "fails-other-threads",
    "forgets-budgets",
    "frees-for-others",
    "gives-half",
    "group-twice",
    "hands-out-shared-twice",
    "hands-out-twice",
    "invalid-when-full",
    "keeps-what-fits",
    "loses-pages",
    "name-twice",
    "panics",
    "refuses-own",
    "sleeps",
    "splits-pages",
    "state-as-all",
    "take-counts",
    "takes-nothing",
    "takes-unknown-layers",
    "window-as-all",
    "window-too-short",
};

static void allocator_attach(const host_services *given) {
    services = given;
}

static bool is(const allocator *self, const char *defect) {
    return strcmp(self->defect, defect) == 0;
}

static int32_t allocator_check(host_text role, const host_opening *opening, host_error *error) {
    (void)role;
    const host_text defect = host_string(opening, "defect");
    for (size_t at = 0; at < sizeof DEFECTS / sizeof *DEFECTS; at++) {
        if (host_text_is(defect, DEFECTS[at])) {
            return 0;
        }
    }
    return host_fail(error, HOST_CONFIG, "defect is \"%.*s\", which this fake does not have", (int)defect.length, defect.data);
}

static void allocator_close(void *instance) {
    allocator *self = instance;
    free(self->unused);
    free(self->owners);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

static int32_t allocator_open(const host_pool_opening *opening, void **instance, host_error *error) {
    const int32_t code = allocator_check((host_text){"allocator", 9}, &opening->opening, error);
    if (code != 0) {
        return code;
    }
    allocator *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    pthread_mutex_init(&self->lock, NULL);
    self->opener = pthread_self();
    const host_text defect = host_string(&opening->opening, "defect");
    memcpy(self->defect, defect.data, defect.length);
    host_pool_opening known = *opening;
    if (is(self, "takes-unknown-layers")) {
        known.groups_count = 1;
    }
    const int32_t count = host_share_pool(&known, self->components, MAX_COMPONENTS);
    if (count < 0) {
        allocator_close(self);
        return host_fail(error, count, "these layers are of a kind that is not known, or there are more than %d groups", MAX_COMPONENTS);
    }
    self->count = (uint32_t)count;
    /* What is beside the full layers may have half of the pool, so that a budget is less than what is free. */
    for (uint32_t at = 1; at < self->count; at++) {
        self->components[at].pages = (self->components[at].pages + 1) / 2;
    }
    for (uint32_t at = 0; at < self->count; at++) {
        self->parts[at] = opening->groups[self->components[at].group].parts;
        self->left[at] = (uint64_t)self->components[at].pages * self->parts[at];
    }
    self->pages = opening->pages;
    /* One more, because an allocation of nothing may be NULL. */
    self->unused = calloc((size_t)self->pages + 1, sizeof *self->unused);
    self->owners = malloc((size_t)self->pages + 1);
    if (self->unused == NULL || self->owners == NULL) {
        allocator_close(self);
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for the books of %u pages", opening->pages);
    }
    self->unused_count = self->pages;
    for (uint32_t page = 0; page < self->pages; page++) {
        /* Low pages are handed out first. */
        self->unused[page] = self->pages - 1 - page;
    }
    memset(self->owners, UNUSED, (size_t)self->pages + 1);
    host_log(services, HOST_LOG_DEBUG, "allocator", "%u components, %u pages", self->count, self->pages);
    *instance = self;
    return 0;
}

static int32_t allocator_components(void *instance, host_component *components, size_t room) {
    allocator *self = instance;
    if (room < self->count && !is(self, "components-without-room")) {
        return HOST_INVALID_ARGUMENT;
    }
    memcpy(components, self->components, self->count * sizeof *components);
    self->asked++;
    for (uint32_t at = 0; at < self->count; at++) {
        host_component *of = &components[at];
        of->group = is(self, "group-twice") ? 0 : of->group;
        of->id = is(self, "name-twice") ? 0 : of->id;
        of->tokens /= is(self, "window-too-short") ? 2 : 1;
        if ((is(self, "window-as-all") && of->retains == HOST_RETAINS_NEWEST) ||
            (is(self, "state-as-all") && of->retains == HOST_RETAINS_STATE)) {
            of->retains = HOST_RETAINS_ALL;
        }
    }
    components[0].pages += is(self, "budget-too-large");
    components[0].pages -= is(self, "components-change") && self->asked > 2;
    components[0].pages = is(self, "budget-of-none") ? 0 : components[0].pages;
    return (int32_t)self->count + is(self, "components-count");
}

/* The place of this component, or `count`. */
static uint32_t find(const allocator *self, uint32_t component) {
    uint32_t at = 0;
    while (at < self->count && self->components[at].id != component) {
        at++;
    }
    return at == self->count && is(self, "any-component") ? 0 : at;
}

/* Defects of an answer that would have been right. */
static void spoil(allocator *self, uint32_t of, uint32_t *pages, size_t count) {
    if (is(self, "hands-out-twice") && self->count == 1 && count > 20) {
        self->last = self->has_last ? self->last : pages[1];
        self->has_last = true;
        pages[0] = self->last;
    }
    if (is(self, "hands-out-shared-twice") && self->count > 1 && count > 0) {
        if (of == 0) {
            self->last = pages[0];
            self->has_last = true;
        } else if (self->has_last && count > 3) {
            pages[0] = self->last;
        }
    }
    if (is(self, "beyond-the-pool") && count > 20) {
        pages[0] = self->pages;
    }
    if (is(self, "takes-nothing")) {
        memset(pages, 0, count * sizeof *pages);
    }
}

static int32_t take_some(allocator *self, uint32_t of, uint32_t *pages, size_t count) {
    if (count % self->parts[of] != 0 && !is(self, "splits-pages")) {
        return HOST_INVALID_ARGUMENT;
    }
    const uint64_t by_budget = is(self, "forgets-budgets") ? UINT64_MAX : self->left[of];
    const uint64_t left = by_budget < self->unused_count ? by_budget : self->unused_count;
    const bool fits = count <= left;
    if (!fits && is(self, "invalid-when-full")) {
        return HOST_INVALID_ARGUMENT;
    }
    if (!fits && is(self, "keeps-what-fits")) {
        count = (size_t)left;
    } else if (!fits) {
        return HOST_WOULD_BLOCK;
    }
    for (size_t at = 0; at < count; at++) {
        pages[at] = self->unused[--self->unused_count];
        self->owners[pages[at]] = (uint8_t)of;
    }
    self->left[of] -= count;
    spoil(self, of, pages, count);
    return !fits ? HOST_WOULD_BLOCK : is(self, "take-counts") ? (int32_t)count : 0;
}

/* Whether the component has this page, so that it can be given back. */
static bool has(const allocator *self, uint32_t of, uint32_t page) {
    if (page >= self->pages) {
        return false;
    }
    const uint8_t owner = self->owners[page];
    return owner == of || (is(self, "frees-for-others") && owner != UNUSED);
}

static int32_t give_some(allocator *self, uint32_t of, const uint32_t *pages, size_t count) {
    if (is(self, "refuses-own") && count > 30) {
        return HOST_INVALID_ARGUMENT;
    }
    /* Marked one by one, which finds a page that is named twice. Undone when one cannot be given. */
    for (size_t at = 0; at < count; at++) {
        if (!has(self, of, pages[at])) {
            if (is(self, "gives-half")) {
                count = at;
                break;
            }
            for (size_t earlier = 0; earlier < at; earlier++) {
                self->owners[pages[earlier]] = (uint8_t)of;
            }
            return is(self, "accepts-double-free") ? 0 : HOST_INVALID_ARGUMENT;
        }
        self->owners[pages[at]] = UNUSED;
    }
    const size_t kept = is(self, "loses-pages") && count > 30;
    for (size_t at = 0; at + kept < count; at++) {
        self->unused[self->unused_count++] = pages[at];
    }
    self->left[of] += count;
    return 0;
}

static int32_t allocator_take(void *instance, uint32_t component, uint32_t *pages, size_t count) {
    allocator *self = instance;
    if (is(self, "allocates-on-take")) {
        void *volatile memory = malloc(count + 1);
        free(memory);
    }
    if (is(self, "sleeps")) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (is(self, "fails-other-threads") && !pthread_equal(self->opener, pthread_self())) {
        return HOST_WOULD_BLOCK;
    }
    pthread_mutex_lock(&self->lock);
    const uint32_t of = find(self, component);
    if (of == self->count && is(self, "crashes")) {
        abort();
    }
    const int32_t unknown = is(self, "panics") ? HOST_PANICKED : HOST_INVALID_ARGUMENT;
    const int32_t code = of == self->count ? unknown : take_some(self, of, pages, count);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t allocator_give(void *instance, uint32_t component, const uint32_t *pages, size_t count) {
    allocator *self = instance;
    if (is(self, "allocates-on-give")) {
        void *volatile memory = malloc(count + 1);
        free(memory);
    }
    pthread_mutex_lock(&self->lock);
    const uint32_t of = find(self, component);
    const int32_t code = of == self->count ? HOST_INVALID_ARGUMENT : give_some(self, of, pages, count);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static const host_allocator_role role = {
    .size = sizeof role,
    .open = allocator_open,
    .close = allocator_close,
    .components = allocator_components,
    .take = allocator_take,
    .give = allocator_give,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = allocator_attach,
    .check_config = allocator_check,
    .allocator = &role,
};
