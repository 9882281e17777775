/*
 * A fake for tests: a transfer backend in C over Unix sockets of this machine, with a defect if its configuration names one.
 *
 * A submission waits in a table until the thread of its peer sends it. A thread of the receiving instance lands the bytes in
 * registered memory and answers, which is what completes the submission.
 *
 * There are two locks, never held at once: `lock` for what the hot calls look at, and `memory_lock` for what a fence takes away.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "host_plugin.h"

#ifndef MANIFEST
#define MANIFEST "transfer.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

enum {
    MAX_WRITES = 1024,
    MAX_SUBMISSIONS = 64,
    MAX_PEERS = 64,
    MAX_REGIONS = 1024,
    /* Notifications that wait for the host. Peers wait when it is full. */
    MAX_INBOX = 1024,
    /* Bytes copied at once, and so how long the lock on the memory is held. */
    PIECE = 64 << 10,
    /* The bytes of a write from which on they come from another place. */
    LONG = 192 << 10,
    /* How long a disconnect waits for the proof that nothing is in flight any more, in milliseconds. */
    FENCE_MS = 2000,
    EARLY_NS = 3000000,
    CONNECT_MS = 2000,
    NAME_BYTES = 64,
    /* How late a fence is that does not wait. */
    LATE_MS = 50,
    /* The completion, counted from 1, that gets lost or repeated. */
    VICTIM = 40
};

/* Starts an endpoint; another version of the protocol gets another one. */
static const char MAGIC[8] = {'C', 'W', 'I', 'R', 'E', '0', '0', '1'};

/* How to reach an instance: the abstract name of its socket. */
typedef struct {
    char magic[sizeof MAGIC];
    uint8_t random[16];
} address;

/* What a connection begins with. The answer to a peer that may write is one byte. */
typedef struct {
    char magic[sizeof MAGIC];
    uint8_t name[NAME_BYTES];
    uint32_t name_length;
} hello;

enum { DATA = 1, GOODBYE = 2, WELCOME = 3 };

/* What a submission begins with. Its writes follow, and the answer is a status. */
typedef struct {
    uint32_t kind;
    uint32_t writes;
    uint32_t notification_length;
    uint8_t notification[HOST_NOTIFICATION_BYTES];
} head;

/* What a write begins with. Its bytes follow. */
typedef struct {
    uint32_t region;
    uint32_t generation;
    uint64_t offset;
    uint32_t length;
    uint32_t reserved;
} place;

typedef struct transfer transfer;

/* A peer that this instance writes to, and the thread that does. */
typedef struct {
    transfer *owner;
    /* 0 when the place is free. */
    uint32_t id;
    char name[NAME_BYTES];
    size_t name_length;
    int socket;
    pthread_t thread;
    /* There is something to do for the thread. */
    pthread_cond_t work;
    /* The host wants it to end. */
    bool is_ending;
    /* The connection is of no use any more. */
    bool is_lost;
    /* The thread is done, and nothing is in flight to the peer. */
    bool is_done;
} peer;

/* A connection that a peer made to this instance, and the thread that reads from it. */
typedef struct {
    transfer *owner;
    bool is_used;
    /* The thread ends, and can be joined. */
    bool is_over;
    bool may_write;
    /* Nothing of it is to be told to the host any more. */
    atomic_bool is_cut;
    /* -1 when it was closed. */
    int socket;
    char name[NAME_BYTES];
    size_t name_length;
    pthread_t thread;
} inbound;

enum step { UNUSED, QUEUED, RUNNING };

/* A place for one submission. While it is RUNNING it belongs to the thread of its peer. */
typedef struct {
    enum step step;
    /* Its turn among all accepted. */
    uint64_t number;
    host_submission submission;
    size_t count;
    host_write writes[MAX_WRITES];
} job;

struct transfer {
    char name[NAME_BYTES];
    size_t name_length;
    char defect[64];
    bool wakes;
    int event;
    int listener;
    address here;
    pthread_t acceptor;

    pthread_mutex_t lock;
    bool is_closed;
    uint32_t next_peer;
    peer peers[MAX_PEERS];
    uint64_t accepted;
    job jobs[MAX_SUBMISSIONS];
    /* Two rings. */
    host_completion done[MAX_SUBMISSIONS];
    size_t done_first;
    size_t done_waiting;
    /* A completion that comes once more, for the defect "repeats-completion". */
    bool repeats;
    host_completion repeated;
    host_notification inbox[MAX_INBOX];
    size_t inbox_first;
    size_t inbox_waiting;
    bool is_signalled;
    /* There is room in the inbox, or it is not to be waited for any more. */
    pthread_cond_t room;
    /* A peer's thread or a late fence is done. */
    pthread_cond_t ended;

    pthread_mutex_t memory_lock;
    bool is_stopping;
    uint32_t next_region;
    uint32_t regions_count;
    struct {
        uint32_t id;
        host_memory memory;
    } regions[MAX_REGIONS];
    inbound inbounds[MAX_PEERS];

    /* Of defects. */
    uint64_t completed;
    uint64_t submitted;
    uint64_t cancelled;
    uint32_t asked;
    uint32_t last_peer;
    uint32_t late;
    bool was_full;
};

static const host_services *services;

/* What this fake can do wrong. */
static const char *const DEFECTS[] = {
    "",
    "accepts-too-many",
    "allocates-on-submit",
    "answers-when-closed",
    "any-generation",
    "blocks-in-poll",
    "cancelled-works",
    "cancels-anything",
    "closes-memory",
    "completes-early",
    "connects-anywhere",
    "corrupts-byte",
    "counts-wrong",
    "crashes",
    "deregister-late",
    "deregister-nothing",
    "deregisters-anything",
    "disconnect-late",
    "disconnect-nothing",
    "disconnect-unproven",
    "disconnects-anything",
    "endpoint-grows",
    "event-fd-silent",
    "event-fd-stuck",
    "forgets-cancelled",
    "gone-too-early",
    "hangs-in-submit",
    "keeps-listening",
    "keeps-memory",
    "kind",
    "lands-partly",
    "leaks-connections",
    "leaks-descriptor",
    "leaks-thread",
    "limits-change",
    "limits-submissions",
    "limits-writes",
    "long-errors",
    "loses-completion",
    "misplaces-long",
    "names-none",
    "needs-writes",
    "never-recovers",
    "no-notifications",
    "notifications-too-many",
    "notifies-early",
    "notifies-refused",
    "panics",
    "past-the-end",
    "poll-too-many",
    "registers-anything",
    "repeats-completion",
    "same-peer",
    "same-region",
    "same-source",
    "settled-always",
    "settled-never",
    "settled-when-closed",
    "silent-errors",
    "submit-counts",
};

static void transfer_attach(const host_services *given) {
    services = given;
}

static bool is(const transfer *self, const char *defect) {
    return strcmp(self->defect, defect) == 0;
}

static int32_t transfer_check(host_text role, const host_opening *opening, host_error *error) {
    (void)role;
    const host_text defect = host_string(opening, "defect");
    for (size_t at = 0; at < sizeof DEFECTS / sizeof *DEFECTS; at++) {
        if (host_text_is(defect, DEFECTS[at])) {
            return 0;
        }
    }
    return host_fail(error, HOST_CONFIG, "defect is \"%.*s\", which this fake does not have", (int)defect.length, defect.data);
}

/* A point in time for waits. */
static struct timespec in_ms(uint64_t ms) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t nanoseconds = (uint64_t)now.tv_nsec + ms % 1000 * 1000000;
    now.tv_sec += (time_t)(ms / 1000 + nanoseconds / 1000000000);
    now.tv_nsec = (long)(nanoseconds % 1000000000);
    return now;
}

static void sleep_ms(uint64_t ms) {
    const struct timespec until = in_ms(ms);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

static int32_t closed(host_error *error) {
    return host_fail(error, HOST_CLOSED, "the instance was shut down");
}

static bool is_closed(transfer *self) {
    pthread_mutex_lock(&self->lock);
    const bool answer = self->is_closed;
    pthread_mutex_unlock(&self->lock);
    return answer;
}

/* ---- Sockets. ---- */

static bool read_all(int socket, void *bytes, size_t length) {
    uint8_t *at = bytes;
    while (length > 0) {
        const ssize_t count = recv(socket, at, length, 0);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        at += count;
        length -= (size_t)count;
    }
    return true;
}

static bool write_all(int socket, const void *bytes, size_t length) {
    const uint8_t *at = bytes;
    while (length > 0) {
        const ssize_t count = send(socket, at, length, MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        at += count;
        length -= (size_t)count;
    }
    return true;
}

/* How long calls on a socket may take; 0 for ever. */
static void patience(int socket, uint64_t ms) {
    const struct timeval time = {.tv_sec = (time_t)(ms / 1000), .tv_usec = (suseconds_t)(ms % 1000 * 1000)};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
}

/* The name of an instance's socket; its length. */
static socklen_t socket_name(const address *of, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    /* The first byte is zero, which makes it a name that no file has. */
    memcpy(name->sun_path + 1, of, sizeof *of);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + sizeof *of);
}

/* ---- What waits for the host. All of it is called with the lock. ---- */

static void signal_host(transfer *self) {
    if (self->wakes) {
        if (services != NULL) {
            services->wake(services->host);
        }
    } else if (!self->is_signalled && !is(self, "event-fd-silent")) {
        const uint64_t one = 1;
        self->is_signalled = write(self->event, &one, sizeof one) == sizeof one;
    }
}

/* Quiets the descriptor when nothing waits any more. */
static void quiet_host(transfer *self) {
    if (self->is_signalled && self->done_waiting == 0 && self->inbox_waiting == 0 && !is(self, "event-fd-stuck")) {
        uint64_t count;
        self->is_signalled = read(self->event, &count, sizeof count) != sizeof count;
    }
}

static void complete(transfer *self, job *of, int32_t status, uint64_t bytes) {
    of->step = UNUSED;
    self->completed++;
    if (is(self, "loses-completion") && self->completed == VICTIM) {
        return;
    }
    if (is(self, "counts-wrong") && bytes > 0) {
        bytes--;
    }
    /* There is room: a completion that was not fetched counts as a submission, see transfer_submit(). */
    self->done[(self->done_first + self->done_waiting++) % MAX_SUBMISSIONS] =
        (host_completion){.tag = of->submission.tag, .bytes = bytes, .status = status};
    signal_host(self);
}

/* Puts a notification into the inbox, as soon as there is room. Called without the lock. */
static void notify(inbound *from, uint32_t kind, const uint8_t *payload, uint32_t length) {
    transfer *self = from->owner;
    if (is(self, "no-notifications")) {
        return;
    }
    pthread_mutex_lock(&self->lock);
    while (self->inbox_waiting == MAX_INBOX && !self->is_closed && !atomic_load(&from->is_cut)) {
        pthread_cond_wait(&self->room, &self->lock);
    }
    /* After a fence the host hears nothing of the peer, see cut(). */
    if (!self->is_closed && !atomic_load(&from->is_cut)) {
        host_notification *made = &self->inbox[(self->inbox_first + self->inbox_waiting++) % MAX_INBOX];
        *made = (host_notification){
            .kind = is(self, "kind") ? 3 : kind,
            .length = length,
            .peer_name_length = is(self, "names-none") ? 0 : (uint32_t)from->name_length,
        };
        memcpy(made->payload, payload, length);
        memcpy(made->peer_name, from->name, from->name_length);
        signal_host(self);
    }
    pthread_mutex_unlock(&self->lock);
}

/* ---- Memory. ---- */

/* Where a range of a region lies, or NULL when that is not inside. Called with the memory's lock. */
static uint8_t *inside(transfer *self, uint32_t region, const uint32_t *generation, uint64_t offset, uint64_t length) {
    for (uint32_t at = 0; at < self->regions_count; at++) {
        const host_memory *memory = &self->regions[at].memory;
        if (self->regions[at].id == region) {
            const bool fits = length > 0 && offset <= memory->length && length <= memory->length - offset &&
                              (generation == NULL || *generation == memory->generation || is(self, "any-generation"));
            return fits ? (uint8_t *)memory->address + offset : NULL;
        }
    }
    return NULL;
}

static bool holds(transfer *self, uint32_t region, const uint32_t *generation, uint64_t offset, uint64_t length) {
    pthread_mutex_lock(&self->memory_lock);
    const bool answer = inside(self, region, generation, offset, length) != NULL;
    pthread_mutex_unlock(&self->memory_lock);
    return answer;
}

/* Copies from a region of this instance, for sending. */
static bool read_memory(transfer *self, uint32_t region, uint64_t offset, uint8_t *bytes, size_t length) {
    pthread_mutex_lock(&self->memory_lock);
    if (is(self, "same-source") && self->regions_count > 0) {
        region = self->regions[0].id;
    }
    const uint8_t *from = inside(self, region, NULL, offset, length);
    if (from != NULL) {
        memcpy(bytes, from, length);
    }
    pthread_mutex_unlock(&self->memory_lock);
    return from != NULL;
}

/* Copies what a peer sent into a region of that generation, unless the peer was cut off. */
static bool land(inbound *from, const place *where, uint64_t offset, const uint8_t *bytes, size_t length) {
    transfer *self = from->owner;
    pthread_mutex_lock(&self->memory_lock);
    uint8_t *to = inside(self, where->region, &where->generation, offset, length);
    const bool lands = to != NULL && from->may_write;
    if (lands) {
        memcpy(to, bytes, length);
        if (is(self, "past-the-end") && inside(self, where->region, &where->generation, offset, length + 1) != NULL) {
            to[length] = (uint8_t)(to[length] + 1);
        }
    } else if (is(self, "lands-partly") && from->may_write) {
        while (to == NULL && length > 1) {
            to = inside(self, where->region, &where->generation, offset, --length);
        }
        if (to != NULL) {
            memcpy(to, bytes, length);
        }
    }
    pthread_mutex_unlock(&self->memory_lock);
    return lands;
}

/* Cuts off the connections that this peer made to us, or all for NULL. After this nothing of them lands, and nothing is told. */
static void cut(transfer *self, const char *name, size_t name_length) {
    pthread_mutex_lock(&self->memory_lock);
    self->is_stopping |= name == NULL;
    for (size_t at = 0; at < MAX_PEERS; at++) {
        inbound *of = &self->inbounds[at];
        const bool is_meant =
            name == NULL || (of->may_write && of->name_length == name_length && memcmp(of->name, name, name_length) == 0);
        if (of->is_used && of->socket >= 0 && is_meant) {
            of->may_write = false;
            atomic_store(&of->is_cut, true);
            /* Wakes its thread up. */
            shutdown(of->socket, SHUT_RDWR);
        }
    }
    pthread_mutex_unlock(&self->memory_lock);
    /* A thread looks whether it was cut while it has this lock. */
    pthread_mutex_lock(&self->lock);
    pthread_cond_broadcast(&self->room);
    pthread_mutex_unlock(&self->lock);
}

/* ---- Receiving: a thread that accepts, and one for each connection. ---- */

/* Lets a peer in that is of the same user and speaks this protocol. */
static bool admit(inbound *of) {
    transfer *self = of->owner;
    struct ucred user;
    socklen_t length = sizeof user;
    if (getsockopt(of->socket, SOL_SOCKET, SO_PEERCRED, &user, &length) != 0 || user.uid != geteuid()) {
        return false;
    }
    hello said;
    patience(of->socket, CONNECT_MS);
    if (!read_all(of->socket, &said, sizeof said) || memcmp(said.magic, MAGIC, sizeof MAGIC) != 0 ||
        said.name_length > NAME_BYTES) {
        return false;
    }
    patience(of->socket, 0);
    pthread_mutex_lock(&self->memory_lock);
    memcpy(of->name, said.name, said.name_length);
    of->name_length = said.name_length;
    of->may_write = !atomic_load(&of->is_cut);
    const bool is_in = of->may_write;
    pthread_mutex_unlock(&self->memory_lock);
    return is_in && write_all(of->socket, &(uint8_t){WELCOME}, 1);
}

/* Lands one write. False when the connection is lost. */
static bool receive_write(inbound *of, uint8_t *buffer, int32_t *status) {
    transfer *self = of->owner;
    place where;
    if (!read_all(of->socket, &where, sizeof where)) {
        return false;
    }
    /* A write lands whole or not at all; either way it is read, to get to the next. */
    bool fits = holds(self, where.region, &where.generation, where.offset, where.length);
    fits |= is(self, "lands-partly");
    if (!fits) {
        *status = HOST_INVALID_ARGUMENT;
    }
    for (uint64_t at = 0; at < where.length;) {
        const size_t piece = where.length - at < PIECE ? (size_t)(where.length - at) : PIECE;
        if (!read_all(of->socket, buffer, piece)) {
            return false;
        }
        if (is(self, "completes-early") && where.length > LONG && at + piece == where.length) {
            /* Long enough that a kit on a busy machine looks before the last bytes are there. */
            const struct timespec gap = {.tv_nsec = EARLY_NS};
            nanosleep(&gap, NULL);
        }
        /* Looked up for each piece, because the region may be gone by then. */
        if (!fits || !land(of, &where, where.offset + at, buffer, piece)) {
            *status = HOST_INVALID_ARGUMENT;
        }
        at += piece;
    }
    return true;
}

/* Lands submissions until the peer says goodbye, which is true, or is lost. */
static bool receive(inbound *of, uint8_t *buffer) {
    for (;;) {
        head submission;
        if (!read_all(of->socket, &submission, sizeof submission)) {
            return false;
        }
        if (submission.kind != DATA || submission.notification_length > HOST_NOTIFICATION_BYTES) {
            return submission.kind == GOODBYE;
        }
        const bool is_early = is(of->owner, "notifies-early") && submission.writes > 0;
        if (is_early && submission.notification_length > 0) {
            notify(of, HOST_ARRIVED, submission.notification, submission.notification_length);
            /* Long enough that a kit on a busy machine looks before the data is there. */
            const struct timespec gap = {.tv_nsec = EARLY_NS};
            nanosleep(&gap, NULL);
        }
        int32_t status = 0;
        for (uint32_t write = 0; write < submission.writes; write++) {
            if (!receive_write(of, buffer, &status)) {
                return false;
            }
        }
        /* All of its data is there: only now may the host hear of it. */
        const bool is_told = status == 0 || is(of->owner, "notifies-refused");
        if (is_told && submission.notification_length > 0 && !is_early) {
            notify(of, HOST_ARRIVED, submission.notification, submission.notification_length);
        }
        if (!write_all(of->socket, &status, sizeof status)) {
            return false;
        }
    }
}

static void *serve(void *argument) {
    inbound *of = argument;
    transfer *self = of->owner;
    uint8_t buffer[PIECE];
    const bool is_in = admit(of);
    if (is_in && is(self, "gone-too-early")) {
        notify(of, HOST_PEER_GONE, (const uint8_t *)"", 0);
    }
    const bool is_lost = is_in && !receive(of, buffer);
    /* First nothing of the peer may land, then it hears so by the end of the connection, and then the host hears of it. The host is
     * not told of an end that one of the two sides wanted. */
    pthread_mutex_lock(&self->memory_lock);
    const int socket = of->socket;
    of->may_write = false;
    of->socket = -1;
    pthread_mutex_unlock(&self->memory_lock);
    close(socket);
    if (is_lost) {
        notify(of, HOST_PEER_GONE, (const uint8_t *)"", 0);
    }
    pthread_mutex_lock(&self->memory_lock);
    of->is_over = true;
    pthread_mutex_unlock(&self->memory_lock);
    return NULL;
}

/* Joins threads of connections: those that are over, or all. */
static void reap(transfer *self, bool waits) {
    for (size_t at = 0; at < MAX_PEERS; at++) {
        inbound *of = &self->inbounds[at];
        pthread_mutex_lock(&self->memory_lock);
        const bool is_meant = of->is_used && (of->is_over || waits);
        pthread_mutex_unlock(&self->memory_lock);
        if (is_meant) {
            pthread_join(of->thread, NULL);
            pthread_mutex_lock(&self->memory_lock);
            of->is_used = false;
            pthread_mutex_unlock(&self->memory_lock);
        }
    }
}

/* Starts a thread for a connection. Without one the connection ends, which tells the peer. */
static void take_in(transfer *self, int socket) {
    bool is_taken = false;
    pthread_mutex_lock(&self->memory_lock);
    for (size_t at = 0; at < MAX_PEERS && !is_taken && !self->is_stopping; at++) {
        inbound *of = &self->inbounds[at];
        if (!of->is_used) {
            of->owner = self;
            of->is_over = false;
            of->may_write = false;
            atomic_store(&of->is_cut, false);
            of->socket = socket;
            of->name_length = 0;
            if (pthread_create(&of->thread, NULL, serve, of) != 0) {
                break;
            }
            of->is_used = true;
            is_taken = true;
        }
    }
    pthread_mutex_unlock(&self->memory_lock);
    if (!is_taken) {
        close(socket);
    }
}

static void *accept_all(void *argument) {
    transfer *self = argument;
    for (;;) {
        const int socket = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
        /* Until the shutdown ends the socket. What else can fail is of one connection, or passes. */
        if (socket < 0 && errno == EINVAL) {
            break;
        }
        reap(self, false);
        if (socket < 0) {
            sleep_ms(1);
        } else {
            take_in(self, socket);
        }
    }
    reap(self, true);
    return NULL;
}

/* ---- Sending: a thread for each peer. ---- */

/* The peer's next submission, waited for; NULL when it ends. */
static job *next_job(transfer *self, peer *to) {
    pthread_mutex_lock(&self->lock);
    job *next = NULL;
    while (next == NULL && !to->is_ending && !self->is_closed) {
        for (size_t at = 0; at < MAX_SUBMISSIONS; at++) {
            job *of = &self->jobs[at];
            if (of->step == QUEUED && of->submission.peer == to->id && (next == NULL || of->number < next->number)) {
                next = of;
            }
        }
        if (next == NULL) {
            pthread_cond_wait(&to->work, &self->lock);
        } else {
            next->step = RUNNING;
        }
    }
    pthread_mutex_unlock(&self->lock);
    return next;
}

/* Sends the bytes of a write. False when the connection is lost. */
static bool send_write(transfer *self, int socket, const host_write *write, uint8_t *buffer, bool is_wrong) {
    const place where = {
        .region = write->target_region,
        .generation = write->target_generation,
        .offset = write->target_offset,
        .length = write->length,
    };
    if (!write_all(socket, &where, sizeof where)) {
        return false;
    }
    for (uint64_t at = 0; at < write->length;) {
        const size_t piece = write->length - at < PIECE ? (size_t)(write->length - at) : PIECE;
        /* The source may be deregistered meanwhile, which a host does not do to memory in use. */
        const uint64_t from = is(self, "misplaces-long") && at >= LONG ? at - LONG : at;
        if (!read_memory(self, write->source_region, write->source_offset + from, buffer, piece)) {
            return false;
        }
        buffer[piece / 2] ^= is_wrong && piece > 16;
        if (!write_all(socket, buffer, piece)) {
            return false;
        }
        at += piece;
    }
    return true;
}

/* Sends one submission and waits for the peer's answer. False when the connection is lost. */
static bool send_job(transfer *self, int socket, const job *of, uint8_t *buffer, int32_t *status, uint64_t *bytes) {
    *bytes = 0;
    /* Looked at before anything is sent: a write from outside of registered memory must land nothing. */
    for (size_t at = 0; at < of->count; at++) {
        const host_write *write = &of->writes[at];
        if (!holds(self, write->source_region, NULL, write->source_offset, write->length)) {
            *status = HOST_INVALID_ARGUMENT;
            return true;
        }
    }
    head submission = {
        .kind = DATA,
        .writes = (uint32_t)of->count,
        .notification_length = of->submission.notification_length,
    };
    memcpy(submission.notification, of->submission.notification, sizeof submission.notification);
    if (!write_all(socket, &submission, sizeof submission)) {
        return false;
    }
    for (size_t at = 0; at < of->count; at++) {
        const bool is_wrong = is(self, "corrupts-byte") && of->number > 1 && at > 0 && at + 1 == of->count;
        if (!send_write(self, socket, &of->writes[at], buffer, is_wrong)) {
            return false;
        }
        *bytes += of->writes[at].length;
    }
    return is(self, "completes-early") || read_all(socket, status, sizeof *status);
}

static void *send_all(void *argument) {
    peer *to = argument;
    transfer *self = to->owner;
    uint8_t buffer[PIECE];
    job *of;
    while ((of = next_job(self, to)) != NULL) {
        int32_t status = 0;
        uint64_t bytes = 0;
        if (!send_job(self, to->socket, of, buffer, &status, &bytes)) {
            break;
        }
        pthread_mutex_lock(&self->lock);
        complete(self, of, status, status == 0 ? bytes : 0);
        pthread_mutex_unlock(&self->lock);
        /* The answer comes after the completion that it should be waited for. */
        if (is(self, "completes-early") && status == 0 && !read_all(to->socket, &status, sizeof status)) {
            break;
        }
    }
    pthread_mutex_lock(&self->lock);
    to->is_lost = true;
    const bool is_on_purpose = to->is_ending || self->is_closed;
    pthread_mutex_unlock(&self->lock);
    if (is_on_purpose) {
        const head goodbye = {.kind = GOODBYE};
        /* It may be lost already. */
        write_all(to->socket, &goodbye, sizeof goodbye);
    }
    /* The peer's thread answers the end of the data with the end of its own, and lands nothing after that. Until then, what was
     * sent may be on its way. */
    shutdown(to->socket, SHUT_WR);
    while (read_all(to->socket, buffer, 1)) {
    }
    pthread_mutex_lock(&self->lock);
    for (size_t at = 0; at < MAX_SUBMISSIONS; at++) {
        if (self->jobs[at].step != UNUSED && self->jobs[at].submission.peer == to->id) {
            complete(self, &self->jobs[at], HOST_PEER_LOST, 0);
        }
    }
    to->is_done = true;
    pthread_cond_broadcast(&self->ended);
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

static peer *find_peer(transfer *self, uint32_t id) {
    for (size_t at = 0; at < MAX_PEERS; at++) {
        if (id != 0 && self->peers[at].id == id) {
            return &self->peers[at];
        }
    }
    return NULL;
}

/* Waits until the peer's thread is done, or another call has ended it. Called with the lock. */
static bool is_done_by(transfer *self, const peer *of, uint32_t id, const struct timespec *deadline) {
    int waited = 0;
    while (of->id == id && !of->is_done && waited == 0) {
        waited = pthread_cond_timedwait(&self->ended, &self->lock, deadline);
    }
    return of->id != id || of->is_done;
}

/* Ends a connection: 0 when it is proven that nothing lands at the peer any more. Else its thread goes on waiting for the proof.
 * Called with the lock, which it gives back for a while. */
static int32_t end_peer(transfer *self, uint32_t id, const struct timespec *half, const struct timespec *deadline) {
    peer *of = find_peer(self, id);
    if (of == NULL) {
        return HOST_INVALID_ARGUMENT;
    }
    of->is_ending = true;
    pthread_cond_signal(&of->work);
    /* What runs may finish in half of the time. Then it gets an error, instead of waiting for a peer that does not read. */
    if (!is_done_by(self, of, id, half)) {
        shutdown(of->socket, SHUT_WR);
        if (!is_done_by(self, of, id, deadline)) {
            return HOST_TIMEOUT;
        }
    }
    if (of->id == id) {
        const pthread_t thread = of->thread;
        const int socket = of->socket;
        of->id = 0;
        pthread_mutex_unlock(&self->lock);
        pthread_join(thread, NULL);
        close(socket);
        pthread_mutex_lock(&self->lock);
    }
    return 0;
}

/* ---- What the host calls. ---- */

static void destroy(transfer *self) {
    if (is(self, "keeps-listening")) {
        /* Its thread goes on, and needs all of it. */
        return;
    }
    if (self->listener >= 0) {
        close(self->listener);
    }
    if (self->event >= 0 && !is(self, "leaks-descriptor")) {
        close(self->event);
    }
    for (size_t at = 0; at < MAX_PEERS; at++) {
        pthread_cond_destroy(&self->peers[at].work);
    }
    pthread_cond_destroy(&self->room);
    pthread_cond_destroy(&self->ended);
    pthread_mutex_destroy(&self->lock);
    pthread_mutex_destroy(&self->memory_lock);
    free(self);
}

static void *sleep_for_ever(void *argument) {
    for (;;) {
        pause();
    }
    return argument;
}

/* Listens, and starts the thread that accepts. */
static int start(transfer *self) {
    self->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    self->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(self->here.magic, MAGIC, sizeof MAGIC);
    if (self->event < 0 || self->listener < 0 ||
        getrandom(self->here.random, sizeof self->here.random, 0) != sizeof self->here.random) {
        return errno;
    }
    struct sockaddr_un name;
    const socklen_t length = socket_name(&self->here, &name);
    if (bind(self->listener, (const struct sockaddr *)&name, length) != 0 || listen(self->listener, MAX_PEERS) != 0) {
        return errno;
    }
    return pthread_create(&self->acceptor, NULL, accept_all, self);
}

static int32_t transfer_open(const host_opening *opening, void **instance, host_error *error) {
    const int32_t code = transfer_check((host_text){"transfer", 8}, opening, error);
    if (code != 0) {
        return code;
    }
    if (opening->name.length > NAME_BYTES) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the instance's name is longer than %d bytes", NAME_BYTES);
    }
    transfer *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return host_fail(error, HOST_NO_RESOURCE, "there is no memory for an instance");
    }
    memcpy(self->name, opening->name.data, opening->name.length);
    self->name_length = opening->name.length;
    const host_text defect = host_string(opening, "defect");
    memcpy(self->defect, defect.data, defect.length);
    self->wakes = host_integer(opening, "wakes", 0) != 0;
    self->next_peer = 1;
    self->next_region = 1;
    pthread_mutex_init(&self->lock, NULL);
    pthread_mutex_init(&self->memory_lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&self->room, &attributes);
    pthread_cond_init(&self->ended, &attributes);
    for (size_t at = 0; at < MAX_PEERS; at++) {
        pthread_cond_init(&self->peers[at].work, &attributes);
    }
    pthread_condattr_destroy(&attributes);
    const int failed = start(self);
    if (failed != 0) {
        destroy(self);
        return host_fail(error, HOST_IO, "cannot listen on a socket: %s", strerror(failed));
    }
    if (is(self, "leaks-thread")) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, sleep_for_ever, NULL) == 0) {
            pthread_detach(thread);
        }
    }
    *instance = self;
    return 0;
}

static void transfer_close(void *instance) {
    destroy(instance);
}

static void transfer_limits(void *instance, host_transfer_limits *limits) {
    transfer *self = instance;
    *limits = (host_transfer_limits){.max_writes = MAX_WRITES, .max_submissions = MAX_SUBMISSIONS};
    if (is(self, "limits-writes")) {
        limits->max_writes *= 2;
    } else if (is(self, "limits-submissions")) {
        limits->max_submissions *= 2;
    } else if (is(self, "accepts-too-many")) {
        limits->max_submissions /= 2;
    } else if (is(self, "limits-change")) {
        limits->max_submissions -= __atomic_fetch_add(&self->asked, 1, __ATOMIC_RELAXED) % 2;
    }
}

static int32_t transfer_register(void *instance, const host_memory *memory, uint32_t *region, host_error *error) {
    transfer *self = instance;
    if (is_closed(self)) {
        return closed(error);
    }
    if (memory->kind != HOST_DRAM) {
        if (is(self, "registers-anything")) {
            *region = UINT32_MAX;
            return 0;
        }
        if (is(self, "silent-errors")) {
            return HOST_UNSUPPORTED;
        }
        const int32_t code = host_fail(error, HOST_UNSUPPORTED, "only host memory can be registered");
        if (is(self, "long-errors")) {
            error->length = SIZE_MAX;
        }
        return code;
    }
    const uint64_t start = (uint64_t)(uintptr_t)memory->address;
    if (start == 0 || memory->length == 0 || start + memory->length < start) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
    }
    if (is(self, "closes-memory")) {
        close(memory->fd);
    }
    if (is(self, "keeps-memory")) {
        /* It is never closed. */
        (void)!dup(memory->fd);
    }
    pthread_mutex_lock(&self->memory_lock);
    int32_t code = 0;
    if (self->regions_count == MAX_REGIONS) {
        code = host_fail(error, HOST_NO_RESOURCE, "%d regions are registered", MAX_REGIONS);
    } else {
        self->regions[self->regions_count].id = self->next_region++;
        self->regions[self->regions_count].memory = *memory;
        self->regions_count++;
        *region = self->regions[is(self, "same-region") ? 0 : self->regions_count - 1].id;
    }
    pthread_mutex_unlock(&self->memory_lock);
    return code;
}

static bool forget(transfer *self, uint32_t region) {
    pthread_mutex_lock(&self->memory_lock);
    uint32_t at = 0;
    while (at < self->regions_count && self->regions[at].id != region) {
        at++;
    }
    const bool is_there = at < self->regions_count;
    if (is_there) {
        self->regions[at] = self->regions[--self->regions_count];
    }
    pthread_mutex_unlock(&self->memory_lock);
    return is_there;
}

static int32_t disconnect(transfer *self, uint32_t id, host_error *error);

/* A fence that is carried out after it has returned. */
typedef struct {
    transfer *self;
    uint32_t region;
    uint32_t peer;
} late;

static void *run_late(void *argument) {
    late *of = argument;
    sleep_ms(LATE_MS);
    if (of->region != 0) {
        forget(of->self, of->region);
    }
    if (of->peer != 0) {
        disconnect(of->self, of->peer, NULL);
    }
    pthread_mutex_lock(&of->self->lock);
    of->self->late--;
    pthread_cond_broadcast(&of->self->ended);
    pthread_mutex_unlock(&of->self->lock);
    free(of);
    return NULL;
}

static int32_t start_late(transfer *self, uint32_t region, uint32_t peer) {
    late *of = malloc(sizeof *of);
    pthread_t thread;
    *of = (late){self, region, peer};
    pthread_mutex_lock(&self->lock);
    self->late++;
    pthread_mutex_unlock(&self->lock);
    pthread_create(&thread, NULL, run_late, of);
    pthread_detach(thread);
    return 0;
}

static int32_t transfer_deregister(void *instance, uint32_t region, host_error *error) {
    transfer *self = instance;
    if (is_closed(self)) {
        return closed(error);
    }
    if (is(self, "deregister-nothing")) {
        return 0;
    }
    if (is(self, "deregister-late")) {
        return start_late(self, region, 0);
    }
    /* Threads that touch a region have the lock, so that it is not touched any more. */
    return forget(self, region) || is(self, "deregisters-anything")
               ? 0
               : host_fail(error, HOST_INVALID_ARGUMENT, "no region has the id %u", region);
}

static int32_t transfer_endpoint(void *instance, uint8_t *bytes, size_t room, size_t *length, host_error *error) {
    transfer *self = instance;
    if (is_closed(self)) {
        return closed(error);
    }
    *length = is(self, "endpoint-grows") ? room + 1 : sizeof self->here;
    if (*length <= room) {
        memcpy(bytes, &self->here, sizeof self->here);
    }
    return 0;
}

/* A socket that is connected to a peer and was let in; -1 and why not. */
static int dial(transfer *self, const address *there, const char **why) {
    const int found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (found < 0) {
        *why = strerror(errno);
        return -1;
    }
    patience(found, CONNECT_MS);
    struct sockaddr_un name;
    const socklen_t length = socket_name(there, &name);
    hello said = {.name_length = (uint32_t)self->name_length};
    memcpy(said.magic, MAGIC, sizeof MAGIC);
    memcpy(said.name, self->name, self->name_length);
    uint8_t answer = 0;
    if (connect(found, (const struct sockaddr *)&name, length) != 0) {
        *why = strerror(errno);
    } else if (!write_all(found, &said, sizeof said) || !read_all(found, &answer, 1) || answer != WELCOME) {
        *why = "it does not let this instance in";
    } else {
        patience(found, 0);
        return found;
    }
    close(found);
    return -1;
}

static struct timespec fence_end(void) {
    return in_ms(FENCE_MS);
}

/* Keeps a connection and starts its thread. Called with the lock. */
static int32_t keep(transfer *self, host_text name, int socket, uint32_t *id, host_error *error) {
    if (self->is_closed) {
        return closed(error);
    }
    for (size_t at = 0; at < MAX_PEERS; at++) {
        peer *of = &self->peers[at];
        if (of->id == 0) {
            of->owner = self;
            of->id = self->next_peer;
            memcpy(of->name, name.data, name.length);
            of->name_length = name.length;
            of->socket = socket;
            of->is_ending = of->is_lost = of->is_done = false;
            const int failed = pthread_create(&of->thread, NULL, send_all, of);
            if (failed != 0) {
                of->id = 0;
                return host_fail(error, HOST_IO, "cannot start a thread: %s", strerror(failed));
            }
            *id = self->next_peer++;
            self->last_peer = *id;
            return 0;
        }
    }
    return host_fail(error, HOST_NO_RESOURCE, "%d peers are connected", MAX_PEERS);
}

static int32_t connect_to(
    transfer *self, host_text name, const uint8_t *endpoint, size_t length, uint32_t *id, host_error *error) {
    if (is_closed(self)) {
        return closed(error);
    }
    address there;
    if (length != sizeof there || memcmp(endpoint, MAGIC, sizeof MAGIC) != 0) {
        return host_fail(error, HOST_VERSION, "the endpoint is not one of this backend");
    }
    memcpy(&there, endpoint, sizeof there);
    if (name.length > NAME_BYTES) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "the peer's name is longer than %d bytes", NAME_BYTES);
    }
    /* A connection under the same name gives way: most likely it was lost. */
    uint32_t old = 0;
    pthread_mutex_lock(&self->lock);
    for (size_t at = 0; at < MAX_PEERS; at++) {
        const peer *of = &self->peers[at];
        if (of->id != 0 && of->name_length == name.length && memcmp(of->name, name.data, name.length) == 0) {
            old = of->id;
        }
    }
    const struct timespec half = in_ms(FENCE_MS / 2), deadline = fence_end();
    const bool is_held = old != 0 && end_peer(self, old, &half, &deadline) == HOST_TIMEOUT;
    pthread_mutex_unlock(&self->lock);
    if (is_held) {
        return host_fail(error, HOST_TIMEOUT, "the old connection to %.*s does not end", (int)name.length, name.data);
    }
    const char *why = "";
    const int socket = dial(self, &there, &why);
    if (socket < 0) {
        return host_fail(error, HOST_PEER_LOST, "%.*s does not answer: %s", (int)name.length, name.data, why);
    }
    pthread_mutex_lock(&self->lock);
    const int32_t code = keep(self, name, socket, id, error);
    pthread_mutex_unlock(&self->lock);
    if (code != 0) {
        close(socket);
    }
    return code;
}

static int32_t transfer_connect(
    void *instance, host_text name, const uint8_t *endpoint, size_t length, uint32_t *id, host_error *error) {
    transfer *self = instance;
    int32_t code = connect_to(self, name, endpoint, length, id, error);
    if (is(self, "leaks-connections")) {
        const int leaked = dup(self->listener);
        (void)leaked;
    }
    if (code != 0 && is(self, "connects-anywhere")) {
        *id = UINT32_MAX;
        code = 0;
    } else if (code == 0 && is(self, "same-peer")) {
        *id = 1;
    }
    return code;
}

/* The peer that the host means. */
static uint32_t meant(const transfer *self, uint32_t id) {
    return is(self, "same-peer") ? self->last_peer : id;
}

static int32_t disconnect(transfer *self, uint32_t id, host_error *error) {
    char name[NAME_BYTES];
    size_t name_length = 0;
    pthread_mutex_lock(&self->lock);
    const peer *of = find_peer(self, id);
    if (of != NULL) {
        name_length = of->name_length;
        memcpy(name, of->name, name_length);
    }
    pthread_mutex_unlock(&self->lock);
    if (of == NULL) {
        return host_fail(error, HOST_INVALID_ARGUMENT, "no peer has the id %u", id);
    }
    /* Its connections to us first: once they are cut, nothing of the peer lands here. */
    cut(self, name, name_length);
    const struct timespec half = in_ms(FENCE_MS / 2), deadline = fence_end();
    pthread_mutex_lock(&self->lock);
    const int32_t code = end_peer(self, id, &half, &deadline);
    pthread_mutex_unlock(&self->lock);
    if (code == HOST_TIMEOUT) {
        return host_fail(
            error, code, "%.*s has not confirmed that nothing is in flight to it", (int)name_length, name);
    }
    /* Another call was faster, which is as good. */
    return 0;
}

static int32_t transfer_disconnect(void *instance, uint32_t id, host_error *error) {
    transfer *self = instance;
    if (is_closed(self)) {
        return closed(error);
    }
    id = meant(self, id);
    if (is(self, "disconnect-nothing")) {
        return 0;
    }
    if (is(self, "disconnect-late")) {
        return start_late(self, 0, id);
    }
    const int32_t code = disconnect(self, id, error);
    if (is(self, "disconnect-unproven")) {
        return host_fail(error, HOST_TIMEOUT, "this fake never proves it");
    }
    return is(self, "disconnects-anything") ? 0 : code;
}

/* Defects of submit that show before anything else. */
static bool is_spoiled(const transfer *self, const host_submission *submission, size_t count, int32_t *code) {
    while (is(self, "hangs-in-submit")) {
        pause();
    }
    if (is(self, "allocates-on-submit")) {
        void *volatile memory = malloc(count + 1);
        free(memory);
    }
    if (count == 0 && is(self, "needs-writes")) {
        *code = HOST_INVALID_ARGUMENT;
        return true;
    }
    if (count == 0 && submission->notification_length == 0) {
        if (is(self, "crashes")) {
            abort();
        }
        *code = HOST_PANICKED;
        return is(self, "panics");
    }
    return false;
}

static int32_t transfer_submit(void *instance, const host_submission *submission, const host_write *writes, size_t count) {
    transfer *self = instance;
    int32_t code = 0;
    if (is_spoiled(self, submission, count, &code)) {
        return code;
    }
    if (count > MAX_WRITES || submission->notification_length > HOST_NOTIFICATION_BYTES) {
        return HOST_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&self->lock);
    const uint32_t id = meant(self, submission->peer);
    peer *to = find_peer(self, id);
    /* A completion that was not fetched keeps its place, so that there is always room for one more. */
    size_t taken = self->done_waiting;
    job *unused = NULL;
    for (size_t at = 0; at < MAX_SUBMISSIONS; at++) {
        if (self->jobs[at].step == UNUSED) {
            unused = &self->jobs[at];
        } else {
            taken++;
        }
    }
    if (self->is_closed) {
        code = is(self, "answers-when-closed") ? 0 : HOST_CLOSED;
    } else if (to == NULL) {
        code = HOST_INVALID_ARGUMENT;
    } else if (to->is_lost) {
        code = HOST_PEER_LOST;
    } else if (taken >= MAX_SUBMISSIONS || unused == NULL || (is(self, "never-recovers") && self->was_full)) {
        self->was_full = true;
        code = HOST_WOULD_BLOCK;
    } else {
        unused->step = QUEUED;
        unused->number = ++self->accepted;
        unused->submission = *submission;
        unused->submission.peer = id;
        unused->count = count;
        if (count > 0) {
            memcpy(unused->writes, writes, count * sizeof *writes);
        }
        pthread_cond_signal(&to->work);
        code = is(self, "submit-counts") ? 1 : 0;
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t transfer_poll(void *instance, host_completion *completions, size_t room) {
    transfer *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && (self->repeats || self->done_waiting > 0)) {
        if (self->repeats) {
            self->repeats = false;
            completions[count++] = self->repeated;
            continue;
        }
        completions[count] = self->done[self->done_first];
        self->done_first = (self->done_first + 1) % MAX_SUBMISSIONS;
        self->done_waiting--;
        self->submitted++;
        if (is(self, "repeats-completion") && self->submitted == VICTIM) {
            // In the next poll, if this one has no room left.
            self->repeats = true;
            self->repeated = completions[count];
        }
        count += !(is(self, "forgets-cancelled") && completions[count].tag == self->cancelled);
    }
    quiet_host(self);
    pthread_mutex_unlock(&self->lock);
    if (count == 0 && is(self, "blocks-in-poll")) {
        sleep_ms(1);
    }
    return is(self, "poll-too-many") && count > 0 ? (int32_t)room + 1 : count;
}

static int32_t transfer_notifications(void *instance, host_notification *notifications, size_t room) {
    transfer *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t count = self->is_closed ? HOST_CLOSED : 0;
    while (count >= 0 && (size_t)count < room && self->inbox_waiting > 0) {
        notifications[count++] = self->inbox[self->inbox_first];
        self->inbox_first = (self->inbox_first + 1) % MAX_INBOX;
        self->inbox_waiting--;
    }
    if (count > 0) {
        pthread_cond_broadcast(&self->room);
    }
    quiet_host(self);
    pthread_mutex_unlock(&self->lock);
    return is(self, "notifications-too-many") && count > 0 ? (int32_t)room + 1 : count;
}

static int32_t transfer_cancel(void *instance, uint64_t tag) {
    transfer *self = instance;
    pthread_mutex_lock(&self->lock);
    self->cancelled = tag;
    int32_t code = self->is_closed ? HOST_CLOSED : is(self, "cancels-anything") ? 0 : HOST_INVALID_ARGUMENT;
    for (size_t at = 0; at < MAX_SUBMISSIONS && !self->is_closed; at++) {
        job *of = &self->jobs[at];
        if (of->step != UNUSED && of->submission.tag == tag) {
            code = 0;
            /* What runs, runs to its end, which is soon. */
            if (of->step == QUEUED) {
                complete(self, of, is(self, "cancelled-works") ? 0 : HOST_CANCELLED, 0);
            }
        }
    }
    pthread_mutex_unlock(&self->lock);
    return code;
}

static int32_t transfer_settled(void *instance, uint64_t tag) {
    transfer *self = instance;
    pthread_mutex_lock(&self->lock);
    int32_t answer = 1;
    for (size_t at = 0; at < MAX_SUBMISSIONS; at++) {
        if (self->jobs[at].step != UNUSED && self->jobs[at].submission.tag == tag) {
            answer = 0;
        }
    }
    if (is(self, "settled-always")) {
        answer = 1;
    } else if (is(self, "settled-never")) {
        answer = 0;
    } else if (self->is_closed && !is(self, "settled-when-closed")) {
        answer = HOST_CLOSED;
    }
    pthread_mutex_unlock(&self->lock);
    return answer;
}

static int32_t transfer_event_fd(void *instance) {
    const transfer *self = instance;
    return self->wakes ? HOST_WAKES : self->event;
}

static int32_t transfer_shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    transfer *self = instance;
    const uint64_t ms = deadline_ms < 60000 ? deadline_ms : 60000;
    const struct timespec half = in_ms(ms / 2), deadline = in_ms(ms);
    pthread_mutex_lock(&self->lock);
    if (self->is_closed) {
        pthread_mutex_unlock(&self->lock);
        return 0;
    }
    while (self->late > 0) {
        pthread_cond_wait(&self->ended, &self->lock);
    }
    self->is_closed = true;
    pthread_cond_broadcast(&self->room);
    bool is_proven = true;
    for (size_t at = 0; at < MAX_PEERS; at++) {
        const uint32_t id = self->peers[at].id;
        while (id != 0 && end_peer(self, id, &half, &deadline) == HOST_TIMEOUT) {
            /* Without the proof: its thread gets errors from now on, and ends. */
            is_proven = false;
            shutdown(self->peers[at].socket, SHUT_RDWR);
            const struct timespec soon = in_ms(FENCE_MS);
            is_done_by(self, &self->peers[at], id, &soon);
        }
    }
    pthread_mutex_unlock(&self->lock);
    cut(self, NULL, 0);
    if (!is(self, "keeps-listening")) {
        /* Ends the thread that accepts, which joins the others. */
        shutdown(self->listener, SHUT_RDWR);
        pthread_join(self->acceptor, NULL);
    }
    return is_proven ? 0 : host_fail(error, HOST_TIMEOUT, "a peer did not answer before the deadline");
}

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
    .cancel = transfer_cancel,
    .settled = transfer_settled,
    .event_fd = transfer_event_fd,
    .shutdown = transfer_shutdown,
};

const host_plugin host_plugin_c = {
    HOST_PLUGIN_HEADER,
    .attach = transfer_attach,
    .check_config = transfer_check,
    .transfer = &role,
};
