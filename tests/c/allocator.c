/*
 * A fake for tests: an allocator in C with a free list for each pool, and with a defect if its configuration names one.
 * Components that share have one pool, in which each page knows whose it is.
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
    uint32_t pages;
    /* A stack of those that are free. */
    uint32_t *unused;
    uint32_t unused_count;
    /* By page: which component has it, counted from 0, or UNUSED. */
    uint8_t *owners;
} pool;

typedef struct {
    host_component_pool opened;
    /* Pool pages that a page is made of. */
    uint32_t parts;
    /* Most pool pages, and those that it has. */
    uint64_t limit;
    uint64_t taken;
    pool *pool;
    pool own;
} component;

typedef struct {
    pthread_mutex_t lock;
    component components[MAX_COMPONENTS];
    uint32_t count;
    /* Of those that share. */
    pool shared;

    /* Of defects. */
    char defect[64];
    pthread_t opener;
    uint32_t last;
    bool has_last;
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
    "budgets-count",
    "budgets-swapped",
    "budgets-without-room",
    "crashes",
    "fails-other-threads",
    "forgets-limits",
    "forgets-parts",
    "frees-for-others",
    "gives-half",
    "hands-out-shared-twice",
    "hands-out-twice",
    "invalid-when-full",
    "keeps-what-fits",
    "loses-pages",
    "panics",
    "refuses-own",
    "sleeps",
    "splits-pages",
    "stale-budgets",
    "take-counts",
    "takes-nothing",
    "wrong-totals",
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

static bool fill(pool *of, uint32_t pages) {
    of->pages = pages;
    of->unused_count = pages;
    /* One more, because an allocation of nothing may be NULL. */
    of->unused = malloc(((size_t)pages + 1) * sizeof *of->unused);
    of->owners = malloc((size_t)pages + 1);
    if (of->unused == NULL || of->owners == NULL) {
        return false;
    }
    for (uint32_t page = 0; page < pages; page++) {
        /* Low pages are handed out first. */
        of->unused[page] = pages - 1 - page;
    }
    memset(of->owners, UNUSED, pages);
    return true;
}

static void empty(pool *of) {
    free(of->unused);
    free(of->owners);
}

static void allocator_close(void *instance) {
    allocator *self = instance;
    for (uint32_t at = 0; at < self->count; at++) {
        empty(&self->components[at].own);
    }
    empty(&self->shared);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Whether the opening describes pools that can be. */
static int32_t check_pools(const host_pool_opening *opening, uint64_t *shared, host_error *error) {
    if (opening->page_tokens == 0) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "a page must hold at least one token");
    }
    if (opening->components_count == 0 || opening->components_count > MAX_COMPONENTS) {
        return host_fail(
            error, HOST_INVALID_ARGUMENT, "%u components, 1 to %d are allowed", opening->components_count, MAX_COMPONENTS);
    }
    *shared = 0;
    for (uint32_t at = 0; at < opening->components_count; at++) {
        const host_component_pool *of = &opening->components[at];
        const uint64_t pages = (uint64_t)of->parts * of->pages;
        *shared = pages > *shared ? pages : *shared;
        for (uint32_t other = 0; other < at; other++) {
            if (opening->components[other].component == of->component) {
                return host_fail(error, HOST_INVALID_ARGUMENT, "component %u is there twice", of->component);
            }
        }
    }
    return *shared <= UINT32_MAX ? 0 : host_fail(error, HOST_INVALID_ARGUMENT, "more pool pages than can be named");
}

static int32_t allocator_open(const host_pool_opening *opening, void **instance, host_error *error) {
    int32_t code = allocator_check((host_text){"allocator", 9}, &opening->opening, error);
    uint64_t shared = 0;
    if (code == 0) {
        code = check_pools(opening, &shared, error);
    }
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
    bool fits = fill(&self->shared, (uint32_t)shared);
    self->count = opening->components_count;
    for (uint32_t at = 0; at < self->count; at++) {
        component *of = &self->components[at];
        of->opened = opening->components[at];
        const bool shares = of->opened.parts > 0;
        of->parts = shares ? of->opened.parts : 1;
        of->limit = (uint64_t)of->parts * of->opened.pages;
        of->pool = shares ? &self->shared : &of->own;
        fits = fits && (shares || fill(&of->own, of->opened.pages));
    }
    if (!fits) {
        allocator_close(self);
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for the books of these pools");
    }
    host_log(services, HOST_LOG_INFO, "allocator", "%u components, %u pool pages shared", self->count, (uint32_t)shared);
    *instance = self;
    return 0;
}

/* The component of this name, or NULL. */
static component *find(allocator *self, uint32_t name) {
    for (uint32_t at = 0; at < self->count; at++) {
        if (self->components[at].opened.component == name) {
            return &self->components[at];
        }
    }
    return is(self, "any-component") ? &self->components[0] : NULL;
}

static bool shares(const component *of) {
    return of->opened.parts > 0;
}

/* Pool pages that the component may still take. */
static uint64_t left(const allocator *self, const component *of) {
    const uint64_t by_limit = is(self, "forgets-limits") ? UINT64_MAX : of->limit - of->taken;
    return by_limit < of->pool->unused_count ? by_limit : of->pool->unused_count;
}

static int32_t allocator_budgets(void *instance, host_budget *budgets, size_t room) {
    allocator *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t answer = (int32_t)self->count;
    if (room < self->count && !is(self, "budgets-without-room")) {
        answer = HOST_INVALID_ARGUMENT;
    } else {
        for (uint32_t at = 0; at < self->count; at++) {
            const component *of = &self->components[at];
            budgets[at] = (host_budget){
                .component = self->components[is(self, "budgets-swapped") ? self->count - 1 - at : at].opened.component,
                .total = of->opened.pages - is(self, "wrong-totals"),
                .free = (uint32_t)(left(self, of) / (is(self, "forgets-parts") ? 1 : of->parts)),
            };
            if (is(self, "stale-budgets")) {
                budgets[at].free = of->opened.pages;
            }
        }
        answer += is(self, "budgets-count");
    }
    pthread_mutex_unlock(&self->lock);
    return answer;
}

/* Defects of an answer that would have been right. */
static void spoil(allocator *self, const component *of, uint32_t *pages, size_t count) {
    const bool is_full = of->opened.component == HOST_COMPONENT_FULL;
    if (is(self, "hands-out-twice") && !shares(of) && is_full && count > 20) {
        self->last = self->has_last ? self->last : pages[1];
        self->has_last = true;
        pages[0] = self->last;
    }
    if (is(self, "hands-out-shared-twice") && shares(of) && count > 0) {
        if (is_full) {
            self->last = pages[0];
            self->has_last = true;
        } else if (self->has_last && count > 3) {
            pages[0] = self->last;
        }
    }
    if (is(self, "beyond-the-pool") && count > 20) {
        pages[0] = of->pool->pages;
    }
    if (is(self, "takes-nothing")) {
        memset(pages, 0, count * sizeof *pages);
    }
}

static int32_t take_some(allocator *self, component *of, uint32_t *pages, size_t count) {
    if (count % of->parts != 0 && !is(self, "splits-pages")) {
        return HOST_INVALID_ARGUMENT;
    }
    const bool fits = count <= left(self, of);
    if (!fits && is(self, "invalid-when-full")) {
        return HOST_INVALID_ARGUMENT;
    }
    if (!fits && is(self, "keeps-what-fits")) {
        count = (size_t)left(self, of);
    } else if (!fits) {
        return HOST_WOULD_BLOCK;
    }
    for (size_t at = 0; at < count; at++) {
        pages[at] = of->pool->unused[--of->pool->unused_count];
        of->pool->owners[pages[at]] = (uint8_t)(of - self->components);
    }
    of->taken += count;
    spoil(self, of, pages, count);
    return !fits ? HOST_WOULD_BLOCK : is(self, "take-counts") ? (int32_t)count : 0;
}

static int32_t allocator_take(void *instance, uint32_t name, uint32_t *pages, size_t count) {
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
    component *of = find(self, name);
    if (of == NULL && is(self, "crashes")) {
        abort();
    }
    int32_t code = is(self, "panics") ? HOST_PANICKED : HOST_INVALID_ARGUMENT;
    if (of != NULL) {
        code = take_some(self, of, pages, count);
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

/* Whether the component has this page, so that it can be given back. */
static bool has(const allocator *self, const component *of, uint32_t page) {
    if (page >= of->pool->pages) {
        return false;
    }
    const uint8_t owner = of->pool->owners[page];
    return owner == (uint8_t)(of - self->components) || (is(self, "frees-for-others") && owner != UNUSED);
}

static int32_t give_some(allocator *self, component *of, const uint32_t *pages, size_t count) {
    if (is(self, "refuses-own") && count > 30) {
        return HOST_INVALID_ARGUMENT;
    }
    /* Marked one by one, which finds a page that is named twice; undone when one of them is not the component's. */
    for (size_t at = 0; at < count; at++) {
        if (!has(self, of, pages[at])) {
            if (is(self, "gives-half")) {
                count = at;
                break;
            }
            for (size_t earlier = 0; earlier < at; earlier++) {
                of->pool->owners[pages[earlier]] = (uint8_t)(of - self->components);
            }
            return is(self, "accepts-double-free") ? 0 : HOST_INVALID_ARGUMENT;
        }
        of->pool->owners[pages[at]] = UNUSED;
    }
    const size_t kept = is(self, "loses-pages") && !shares(of) && count > 30;
    for (size_t at = 0; at + kept < count; at++) {
        of->pool->unused[of->pool->unused_count++] = pages[at];
    }
    of->taken -= count;
    return 0;
}

static int32_t allocator_give(void *instance, uint32_t name, const uint32_t *pages, size_t count) {
    allocator *self = instance;
    if (is(self, "allocates-on-give")) {
        void *volatile memory = malloc(count + 1);
        free(memory);
    }
    pthread_mutex_lock(&self->lock);
    component *of = find(self, name);
    const int32_t code = of == NULL ? HOST_INVALID_ARGUMENT : give_some(self, of, pages, count);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static const host_allocator_role role = {
    .size = sizeof role,
    .open = allocator_open,
    .close = allocator_close,
    .budgets = allocator_budgets,
    .take = allocator_take,
    .give = allocator_give,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = allocator_attach,
    .check_config = allocator_check,
    .allocator = &role,
};
