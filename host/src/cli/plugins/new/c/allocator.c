/*
 * A pool allocator with one free list for each component.
 *
 * To make it yours: take_some() decides which pages are handed out next. All calls but open and close are hot: what you keep is
 * allocated in allocator_open().
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

enum { MAX_COMPONENTS = 16 };

typedef struct {
    host_component_pool opened;
    /* A stack of the pages that are free. */
    uint32_t *unused;
    uint32_t unused_count;
    /* By page. */
    bool *is_taken;
} pool;

typedef struct {
    pthread_mutex_t lock;
    pool pools[MAX_COMPONENTS];
    uint32_t count;
} allocator;

static const host_services *services;

static void allocator_attach(const host_services *given) {
    services = given;
}

static void allocator_close(void *instance) {
    allocator *self = instance;
    for (uint32_t at = 0; at < self->count; at++) {
        free(self->pools[at].unused);
        free(self->pools[at].is_taken);
    }
    pthread_mutex_destroy(&self->lock);
    free(self);
}

/* Whether the opening describes pools that can be. */
static int32_t check_pools(const host_pool_opening *opening, host_error *error) {
    if (opening->page_tokens == 0) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "a page must hold at least one token");
    }
    if (opening->components_count == 0 || opening->components_count > MAX_COMPONENTS) {
        return host_fail(
            error, HOST_INVALID_ARGUMENT, "%u components, 1 to %d are allowed", opening->components_count, MAX_COMPONENTS);
    }
    for (uint32_t at = 0; at < opening->components_count; at++) {
        const host_component_pool *of = &opening->components[at];
        if (of->parts > 0) {
            /* To take such openings, declare shared_pool in plugin.toml. */
            return host_fail(error, HOST_UNSUPPORTED, "component %u shares its pool", of->component);
        }
        for (uint32_t other = 0; other < at; other++) {
            if (opening->components[other].component == of->component) {
                return host_fail(error, HOST_INVALID_ARGUMENT, "component %u is there twice", of->component);
            }
        }
    }
    return 0;
}

static int32_t allocator_open(const host_pool_opening *opening, void **instance, host_error *error) {
    const int32_t code = check_pools(opening, error);
    if (code != 0) {
        return code;
    }
    allocator *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    pthread_mutex_init(&self->lock, NULL);
    self->count = opening->components_count;
    for (uint32_t at = 0; at < self->count; at++) {
        pool *of = &self->pools[at];
        of->opened = opening->components[at];
        /* One more, because an allocation of nothing may be NULL. */
        of->unused = calloc((size_t)of->opened.pages + 1, sizeof *of->unused);
        of->is_taken = calloc((size_t)of->opened.pages + 1, sizeof *of->is_taken);
        if (of->unused == NULL || of->is_taken == NULL) {
            allocator_close(self);
            return host_fail(error, HOST_NO_RESOURCE, "there is no memory for the books of these pools");
        }
        of->unused_count = of->opened.pages;
        for (uint32_t page = 0; page < of->opened.pages; page++) {
            /* Low pages are handed out first. */
            of->unused[page] = of->opened.pages - 1 - page;
        }
    }
    host_log(services, HOST_LOG_DEBUG, "allocator", "%u components", self->count);
    *instance = self;
    return 0;
}

/* The pool of this component, or NULL. */
static pool *find(allocator *self, uint32_t component) {
    for (uint32_t at = 0; at < self->count; at++) {
        if (self->pools[at].opened.component == component) {
            return &self->pools[at];
        }
    }
    return NULL;
}

static int32_t allocator_budgets(void *instance, host_budget *budgets, size_t room) {
    allocator *self = instance;
    if (room < self->count) {
        return HOST_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&self->lock);
    for (uint32_t at = 0; at < self->count; at++) {
        const pool *of = &self->pools[at];
        budgets[at] = (host_budget){.component = of->opened.component, .total = of->opened.pages, .free = of->unused_count};
    }
    pthread_mutex_unlock(&self->lock);
    return (int32_t)self->count;
}

static int32_t take_some(pool *of, uint32_t *pages, size_t count) {
    if (count > of->unused_count) {
        return HOST_WOULD_BLOCK;
    }
    for (size_t at = 0; at < count; at++) {
        pages[at] = of->unused[--of->unused_count];
        of->is_taken[pages[at]] = true;
    }
    return 0;
}

static int32_t give_some(pool *of, const uint32_t *pages, size_t count) {
    /* Marked one by one, which finds a page that is named twice. Undone when one cannot be given. */
    for (size_t at = 0; at < count; at++) {
        if (pages[at] >= of->opened.pages || !of->is_taken[pages[at]]) {
            for (size_t earlier = 0; earlier < at; earlier++) {
                of->is_taken[pages[earlier]] = true;
            }
            return HOST_INVALID_ARGUMENT;
        }
        of->is_taken[pages[at]] = false;
    }
    for (size_t at = 0; at < count; at++) {
        of->unused[of->unused_count++] = pages[at];
    }
    return 0;
}

static int32_t allocator_take(void *instance, uint32_t component, uint32_t *pages, size_t count) {
    allocator *self = instance;
    pthread_mutex_lock(&self->lock);
    pool *of = find(self, component);
    const int32_t code = of == NULL ? HOST_INVALID_ARGUMENT : take_some(of, pages, count);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t allocator_give(void *instance, uint32_t component, const uint32_t *pages, size_t count) {
    allocator *self = instance;
    pthread_mutex_lock(&self->lock);
    pool *of = find(self, component);
    const int32_t code = of == NULL ? HOST_INVALID_ARGUMENT : give_some(of, pages, count);
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
    .allocator = &role,
};
