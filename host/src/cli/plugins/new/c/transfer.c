/*
 * A transfer backend that copies between instances in one process: everything the contract asks for, and no network.
 *
 * The copy happens inside transfer_submit(), under one lock, which keeps the example short. A real backend starts the work there,
 * lets a thread or the hardware finish it, and reports it from transfer_poll().
 *
 * To make it yours: land() is where the bytes move, and an endpoint has to say how another machine reaches this one.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

enum { MAX_WRITES = 1024, MAX_SUBMISSIONS = 256, MAX_INBOX = 1024, MAX_REGIONS = 1024, MAX_PEERS = 64, NAME_BYTES = 64 };

typedef struct backend backend;

struct backend {
    backend *next;
    /* What an endpoint says. Unique among all instances, also those of other processes. */
    uint64_t number;
    uint8_t name[NAME_BYTES];
    uint32_t name_length;
    bool is_closed;
    uint32_t next_id;
    uint32_t regions_count;
    struct {
        uint32_t id;
        host_memory memory;
    } regions[MAX_REGIONS];
    /* Those with the id 0 are unused. */
    struct {
        uint32_t id;
        uint64_t number;
    } peers[MAX_PEERS];
    /* Two rings, because hot calls must not allocate. */
    host_completion done[MAX_SUBMISSIONS];
    size_t done_first;
    size_t done_waiting;
    host_notification inbox[MAX_INBOX];
    size_t inbox_first;
    size_t inbox_waiting;
};

static const host_services *services;

/* Of all that follows. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static backend *all;
static uint64_t last_number;

static void transfer_attach(const host_services *given) {
    services = given;
}

static int32_t transfer_open(const host_opening *opening, void **instance, host_error *error) {
    if (opening->name.length > NAME_BYTES) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the name is longer than %d bytes", NAME_BYTES);
    }
    backend *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    memcpy(self->name, opening->name.data, opening->name.length);
    self->name_length = (uint32_t)opening->name.length;
    self->next_id = 1;
    pthread_mutex_lock(&lock);
    self->number = ((uint64_t)getpid() << 32) + ++last_number;
    self->next = all;
    all = self;
    pthread_mutex_unlock(&lock);
    host_log(services, HOST_LOG_DEBUG, "transfer", "instance %llu is open", (unsigned long long)self->number);
    *instance = self;
    return 0;
}

static void transfer_close(void *instance) {
    backend *self = instance;
    pthread_mutex_lock(&lock);
    backend **at = &all;
    while (*at != self) {
        at = &(*at)->next;
    }
    *at = self->next;
    pthread_mutex_unlock(&lock);
    free(self);
}

static void transfer_limits(void *instance, host_transfer_limits *limits) {
    (void)instance;
    *limits = (host_transfer_limits){.max_writes = MAX_WRITES, .max_submissions = MAX_SUBMISSIONS};
}

static int32_t closed(host_error *error) {
    return host_fail(error, HOST_CLOSED, "the instance was shut down");
}

static int32_t add_region(backend *self, const host_memory *memory, uint32_t *region, host_error *error) {
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
    *region = self->next_id++;
    self->regions[self->regions_count].id = *region;
    self->regions[self->regions_count++].memory = *memory;
    return 0;
}

static int32_t transfer_register(void *instance, const host_memory *memory, uint32_t *region, host_error *error) {
    pthread_mutex_lock(&lock);
    const int32_t code = add_region(instance, memory, region, error);
    pthread_mutex_unlock(&lock);
    return code;
}

static int32_t transfer_deregister(void *instance, uint32_t region, host_error *error) {
    backend *self = instance;
    /* All writes happen under the lock, so that none is on its way. */
    pthread_mutex_lock(&lock);
    uint32_t at = 0;
    while (at < self->regions_count && self->regions[at].id != region) {
        at++;
    }
    int32_t code = 0;
    if (self->is_closed) {
        code = closed(error);
    } else if (at == self->regions_count) {
        code = host_fail(error, HOST_INVALID_ARGUMENT, "no region has the id %u", region);
    } else {
        self->regions[at] = self->regions[--self->regions_count];
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int32_t transfer_endpoint(void *instance, uint8_t *bytes, size_t room, size_t *length, host_error *error) {
    backend *self = instance;
    pthread_mutex_lock(&lock);
    const int32_t code = self->is_closed ? closed(error) : 0;
    pthread_mutex_unlock(&lock);
    *length = sizeof self->number;
    if (code == 0 && room >= *length) {
        memcpy(bytes, &self->number, *length);
    }
    return code;
}

/* The open instance with this number, or NULL. */
static backend *find(uint64_t number) {
    backend *at = all;
    while (at != NULL && at->number != number) {
        at = at->next;
    }
    return at == NULL || at->is_closed ? NULL : at;
}

static int32_t add_peer(backend *self, uint64_t number, uint32_t *peer, host_error *error) {
    if (self->is_closed) {
        return closed(error);
    }
    if (find(number) == NULL) {
        return host_fail(
            error, HOST_PEER_LOST, "instance %llu is not open in this process", (unsigned long long)number);
    }
    for (size_t at = 0; at < MAX_PEERS; at++) {
        if (self->peers[at].id == 0) {
            *peer = self->next_id++;
            self->peers[at].id = *peer;
            self->peers[at].number = number;
            return 0;
        }
    }
    return host_fail(error, HOST_NO_RESOURCE, "%d peers are connected", MAX_PEERS);
}

static int32_t transfer_connect(
    void *instance, host_text name, const uint8_t *endpoint, size_t length, uint32_t *peer, host_error *error) {
    (void)name;
    uint64_t number;
    if (length != sizeof number) {
        return host_fail(error, HOST_VERSION, "the endpoint is not one of this backend");
    }
    memcpy(&number, endpoint, sizeof number);
    pthread_mutex_lock(&lock);
    const int32_t code = add_peer(instance, number, peer, error);
    pthread_mutex_unlock(&lock);
    return code;
}

/* Which place a peer has; MAX_PEERS when it is unknown. */
static size_t peer_at(const backend *self, uint32_t peer) {
    size_t at = 0;
    while (at < MAX_PEERS && (peer == 0 || self->peers[at].id != peer)) {
        at++;
    }
    return at;
}

static int32_t transfer_disconnect(void *instance, uint32_t peer, host_error *error) {
    backend *self = instance;
    pthread_mutex_lock(&lock);
    const size_t at = peer_at(self, peer);
    int32_t code = 0;
    if (self->is_closed) {
        code = closed(error);
    } else if (at == MAX_PEERS) {
        code = host_fail(error, HOST_INVALID_ARGUMENT, "no peer has the id %u", peer);
    } else {
        /* Both ways: the other side starts nothing more towards this instance. */
        backend *other = find(self->peers[at].number);
        for (size_t back = 0; other != NULL && back < MAX_PEERS; back++) {
            if (other->peers[back].number == self->number) {
                other->peers[back].id = 0;
            }
        }
        self->peers[at].id = 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* Where a range of a region starts; NULL when it does not lie inside. `generation` may be NULL. */
static uint8_t *range(const backend *of, uint32_t region, uint64_t offset, uint32_t length, const uint32_t *generation) {
    for (uint32_t at = 0; at < of->regions_count; at++) {
        const host_memory *memory = &of->regions[at].memory;
        if (of->regions[at].id == region) {
            const bool fits = length > 0 && offset <= memory->length && length <= memory->length - offset &&
                              (generation == NULL || *generation == memory->generation);
            return fits ? (uint8_t *)memory->address + offset : NULL;
        }
    }
    return NULL;
}

/* Copies all writes, or none. */
static int32_t land(const backend *from, const backend *to, const host_write *writes, size_t count, uint64_t *bytes) {
    for (size_t at = 0; at < count; at++) {
        const host_write *write = &writes[at];
        if (range(from, write->source_region, write->source_offset, write->length, NULL) == NULL ||
            range(to, write->target_region, write->target_offset, write->length, &write->target_generation) == NULL) {
            return HOST_INVALID_ARGUMENT;
        }
    }
    for (size_t at = 0; at < count; at++) {
        const host_write *write = &writes[at];
        memmove(
            range(to, write->target_region, write->target_offset, write->length, &write->target_generation),
            range(from, write->source_region, write->source_offset, write->length, NULL),
            write->length);
        *bytes += write->length;
    }
    return 0;
}

static int32_t submit(backend *self, const host_submission *submission, const host_write *writes, size_t count) {
    if (self->is_closed) {
        return HOST_CLOSED;
    }
    const size_t at = peer_at(self, submission->peer);
    if (at == MAX_PEERS || count > MAX_WRITES || submission->notification_length > HOST_NOTIFICATION_BYTES) {
        return HOST_INVALID_ARGUMENT;
    }
    backend *peer = find(self->peers[at].number);
    if (peer == NULL) {
        return HOST_PEER_LOST;
    }
    if (self->done_waiting == MAX_SUBMISSIONS || (submission->notification_length > 0 && peer->inbox_waiting == MAX_INBOX)) {
        return HOST_WOULD_BLOCK;
    }
    host_completion done = {.tag = submission->tag};
    done.status = land(self, peer, writes, count, &done.bytes);
    if (done.status == 0 && submission->notification_length > 0) {
        host_notification *told = &peer->inbox[(peer->inbox_first + peer->inbox_waiting++) % MAX_INBOX];
        *told = (host_notification){
            .kind = HOST_ARRIVED, .length = submission->notification_length, .peer_name_length = self->name_length};
        memcpy(told->payload, submission->notification, submission->notification_length);
        memcpy(told->peer_name, self->name, self->name_length);
    }
    self->done[(self->done_first + self->done_waiting++) % MAX_SUBMISSIONS] = done;
    return 0;
}

static int32_t transfer_submit(
    void *instance, const host_submission *submission, const host_write *writes, size_t count) {
    pthread_mutex_lock(&lock);
    const int32_t code = submit(instance, submission, writes, count);
    pthread_mutex_unlock(&lock);
    return code;
}

static int32_t transfer_poll(void *instance, host_completion *completions, size_t room) {
    backend *self = instance;
    pthread_mutex_lock(&lock);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && self->done_waiting > 0) {
        completions[count++] = self->done[self->done_first];
        self->done_first = (self->done_first + 1) % MAX_SUBMISSIONS;
        self->done_waiting--;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static int32_t transfer_notifications(void *instance, host_notification *notifications, size_t room) {
    backend *self = instance;
    pthread_mutex_lock(&lock);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && self->inbox_waiting > 0) {
        notifications[count++] = self->inbox[self->inbox_first];
        self->inbox_first = (self->inbox_first + 1) % MAX_INBOX;
        self->inbox_waiting--;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

static int32_t transfer_settled(void *instance, uint64_t tag) {
    (void)tag;
    backend *self = instance;
    /* Everything has ended by the time that submit answers. */
    pthread_mutex_lock(&lock);
    const int32_t answer = self->is_closed ? HOST_CLOSED : 1;
    pthread_mutex_unlock(&lock);
    return answer;
}

static int32_t transfer_shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    (void)deadline_ms;
    (void)error;
    backend *self = instance;
    pthread_mutex_lock(&lock);
    self->is_closed = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Without cancel nothing is cancelled before it starts; without event_fd the host polls on a timer. */
static const host_transfer_role role = {
    .size = sizeof role,
    .open = transfer_open,
    .close = transfer_close,
    .limits = transfer_limits,
    .register_memory = transfer_register,
    .deregister_memory = transfer_deregister,
    .endpoint = transfer_endpoint,
    .connect = transfer_connect,
    .disconnect = transfer_disconnect,
    .submit = transfer_submit,
    .poll = transfer_poll,
    .notifications = transfer_notifications,
    .settled = transfer_settled,
    .shutdown = transfer_shutdown,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = transfer_attach,
    .transfer = &role,
};
