/*
 * A pool allocator with one free list.
 *
 * To make it yours: take_some() decides which pages are handed out next, and allocator_open() what is declared of each group of layers.
 * All calls but open and close are hot: what you keep is allocated in allocator_open().
 */
#include <pthread.h>
#include <stdlib.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
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
} allocator;

static const host_services *services;

static void allocator_attach(const host_services *given) {
    services = given;
}

static void allocator_close(void *instance) {
    allocator *self = instance;
    free(self->unused);
    free(self->owners);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

static int32_t allocator_open(const host_pool_opening *opening, void **instance, host_error *error) {
    allocator *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    pthread_mutex_init(&self->lock, NULL);
    /* All components may fill the pool. Change `pages` of one to give it less. */
    const int32_t count = host_share_pool(opening, self->components, MAX_COMPONENTS);
    if (count < 0) {
        allocator_close(self);
        return host_fail(error, count, "these layers are of a kind that is not known, or there are more than %d groups", MAX_COMPONENTS);
    }
    self->count = (uint32_t)count;
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
    const allocator *self = instance;
    if (room < self->count) {
        return HOST_INVALID_ARGUMENT;
    }
    memcpy(components, self->components, self->count * sizeof *components);
    return (int32_t)self->count;
}

/* The place of this component, or `count`. */
static uint32_t find(const allocator *self, uint32_t component) {
    uint32_t at = 0;
    while (at < self->count && self->components[at].id != component) {
        at++;
    }
    return at;
}

static int32_t take_some(allocator *self, uint32_t of, uint32_t *pages, size_t count) {
    if (count % self->parts[of] != 0) {
        return HOST_INVALID_ARGUMENT;
    }
    if (count > self->unused_count || count > self->left[of]) {
        return HOST_WOULD_BLOCK;
    }
    for (size_t at = 0; at < count; at++) {
        pages[at] = self->unused[--self->unused_count];
        self->owners[pages[at]] = (uint8_t)of;
    }
    self->left[of] -= count;
    return 0;
}

static int32_t give_some(allocator *self, uint32_t of, const uint32_t *pages, size_t count) {
    /* Marked one by one, which finds a page that is named twice. Undone when one cannot be given. */
    for (size_t at = 0; at < count; at++) {
        if (pages[at] >= self->pages || self->owners[pages[at]] != of) {
            for (size_t earlier = 0; earlier < at; earlier++) {
                self->owners[pages[earlier]] = (uint8_t)of;
            }
            return HOST_INVALID_ARGUMENT;
        }
        self->owners[pages[at]] = UNUSED;
    }
    for (size_t at = 0; at < count; at++) {
        self->unused[self->unused_count++] = pages[at];
    }
    self->left[of] += count;
    return 0;
}

static int32_t allocator_take(void *instance, uint32_t component, uint32_t *pages, size_t count) {
    allocator *self = instance;
    pthread_mutex_lock(&self->lock);
    const uint32_t of = find(self, component);
    const int32_t code = of == self->count ? HOST_INVALID_ARGUMENT : take_some(self, of, pages, count);
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t allocator_give(void *instance, uint32_t component, const uint32_t *pages, size_t count) {
    allocator *self = instance;
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
    .allocator = &role,
};
