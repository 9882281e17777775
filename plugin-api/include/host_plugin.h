/*
 * The plugin API of `host` for C and C++: the same contract as the Rust crate `host-plugin-api`, as tables of functions.
 *
 * A plugin is a shared library with a manifest (HOST_PLUGIN_MANIFEST) and one symbol, `host_plugin_c`, that names the tables of the
 * roles that it plays:
 *
 *     #include "host_plugin.h"
 *
 *     HOST_PLUGIN_MANIFEST("plugin.toml")
 *
 *     static const host_tier_role tier = {.size = sizeof tier, .open = my_open, ...};
 *     const host_plugin host_plugin_c = {HOST_PLUGIN_HEADER, .tier = &tier};
 *
 * Rules for all functions:
 * - Any thread may call any function, several at once.
 * - Functions marked "hot" neither block nor allocate.
 * - A function that returns int32_t answers 0 or a count, or an error code below 0.
 * - A function that takes a host_error fills it when it fails, see host_fail().
 * - Memory belongs to the caller, and is the plugin's until the function returns, unless a comment says more.
 * - Nothing may be thrown out of a function. In C++, host_plugin.hpp catches.
 * - open() sets *instance to what is not NULL. After close() no function of the instance is called.
 * - Structs that a function fills are zero before.
 * - The host never unloads the library.
 *
 * C11 or C++17, 64 bits, ELF.
 */
#ifndef HOST_PLUGIN_H
#define HOST_PLUGIN_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the plugin API that this header is of. */
#define HOST_PLUGIN_API "0.2.0"

/* First bytes of `host_plugin_c`. */
#define HOST_PLUGIN_MAGIC {'H', 'O', 'S', 'T', 'P', 'L', 'G', 'C'}

/* ---- Error codes. An open set: unknown ones count as HOST_INTERNAL. ---- */

enum {
    /* A defect in the plugin. */
    HOST_INTERNAL = -1,
    /* The caller passed something that can never work: an unknown handle, a range outside its region. */
    HOST_INVALID_ARGUMENT = -2,
    /* The plugin does not implement this. */
    HOST_UNSUPPORTED = -3,
    /* No room now; try again after a poll. Carries no text. */
    HOST_WOULD_BLOCK = -4,
    /* The plugin's configuration is wrong. */
    HOST_CONFIG = -5,
    /* The plugin failed in a way that it cannot go on from; the instance refuses further calls. */
    HOST_PANICKED = -6,
    /* The instance was shut down. */
    HOST_CLOSED = -7,
    /* The operating system refused. */
    HOST_IO = -8,
    /* A deadline passed. */
    HOST_TIMEOUT = -9,
    /* A limit was reached: regions, peers, memory. */
    HOST_NO_RESOURCE = -10,
    /* The peer is gone or was disconnected. */
    HOST_PEER_LOST = -11,
    /* The operation was cancelled before it took effect. */
    HOST_CANCELLED = -12,
    /* The other side speaks another version. */
    HOST_VERSION = -13
};

/* ---- Texts and errors. ---- */

/* UTF-8, without a terminating zero. */
typedef struct host_text {
    const char *data;
    size_t length;
} host_text;

/* Where a function writes why it failed: at most `room` bytes of UTF-8 to `text`, and how many to `length`. */
typedef struct host_error {
    char *text;
    size_t room;
    size_t length;
} host_error;

/* ---- Settings: the plugin's table of the configuration. ---- */

enum {
    HOST_SETTING_STRING = 1,
    HOST_SETTING_INTEGER = 2,
    HOST_SETTING_FLOAT = 3,
    HOST_SETTING_BOOLEAN = 4,
    /* An array or a table; `text` is its TOML. */
    HOST_SETTING_TOML = 5
};

/* One key. Those that the operator left out have the manifest's default. */
typedef struct host_setting {
    host_text key;
    /* Of strings, and of HOST_SETTING_TOML. */
    host_text text;
    /* Of integers; of booleans 0 or 1. */
    int64_t integer;
    double number;
    /* HOST_SETTING_STRING, ... */
    uint32_t kind;
    uint32_t reserved;
} host_setting;

/* What an instance is opened with. Valid until open() returns. */
typedef struct host_opening {
    /* Bytes of this struct. */
    uint64_t size;
    /* This worker's name among all peers, at most 64 bytes, different at every start of a process. Empty in check_config(). */
    host_text name;
    /* The plugin's table of the configuration as the operator wrote it, in TOML; empty when there is none. */
    host_text config;
    /* The same, parsed, with the manifest's defaults. */
    const host_setting *settings;
    uint64_t settings_count;
} host_opening;

/* ---- What the host offers. ---- */

enum { HOST_LOG_ERROR = 1, HOST_LOG_WARN = 2, HOST_LOG_INFO = 3, HOST_LOG_DEBUG = 4, HOST_LOG_TRACE = 5 };
enum { HOST_COUNTER = 0, HOST_GAUGE = 1 };

/* Given to attach() before anything else is called; valid as long as the process. */
typedef struct host_services {
    /* Bytes of this struct. */
    uint64_t size;
    /* The first argument of the functions below. */
    void *host;
    /* The least important level that is logged; 0 logs nothing. It changes: read it with host_logs(). */
    const uint64_t *level;
    /* Writes a line into the host's log. At most 200 lines a second are written. */
    void (*log)(void *host, uint32_t level, host_text target, host_text message);
    /* Gives the counter or gauge of this name, [a-z][a-z0-9_]*, at most 64 bytes, at most 64 names. */
    int32_t (*word)(void *host, uint32_t kind, host_text name, uint64_t **word, host_error *error);
    /* Tells the host that an instance whose event_fd answers HOST_WAKES has something to poll. */
    void (*wake)(void *host);
} host_services;

/* Answer of event_fd(): the plugin calls `wake` for everything that is to be polled. */
#define HOST_WAKES (-2)

/* ---- Memory. ---- */

enum { HOST_DRAM = 0, HOST_VRAM = 1 };

/* Memory offered for registration. The host keeps it mapped until the region is deregistered. */
typedef struct host_memory {
    /* First byte, in this process. */
    void *address;
    /* Bytes. */
    uint64_t length;
    /* HOST_DRAM or HOST_VRAM. */
    uint32_t kind;
    /* Ordinal of the device for HOST_VRAM, else 0. */
    uint32_t device;
    /* A descriptor of a shareable file behind the memory, or -1. The plugin may duplicate it. */
    int32_t fd;
    /* Written into every host_write that targets this region; a write with another generation lands nowhere. */
    uint32_t generation;
    /* Offset of the first byte within that file. */
    uint64_t fd_offset;
} host_memory;

/* ---- The transfer role: one-sided writes into another worker's registered memory. docs/plugins/transfer.md ---- */

/* `length` bytes of one of our regions into one of the peer's. */
typedef struct host_write {
    uint32_t source_region;
    /* By the id that the peer was given. */
    uint32_t target_region;
    uint64_t source_offset;
    uint64_t target_offset;
    /* At least 1. */
    uint32_t length;
    uint32_t target_generation;
} host_write;

#define HOST_NOTIFICATION_BYTES 48

/* What goes with a batch of writes. */
typedef struct host_submission {
    uint32_t peer;
    /* Bytes of `notification` that count; 0 sends none. */
    uint32_t notification_length;
    /* The host's name for this submission. It never comes again within an instance, once a submission with it was accepted. */
    uint64_t tag;
    /* Delivered to the peer after the data. */
    uint8_t notification[HOST_NOTIFICATION_BYTES];
} host_submission;

/* How an accepted submission ended on the sending side. */
typedef struct host_completion {
    uint64_t tag;
    /* Bytes written, when `status` is 0: all of the submission. */
    uint64_t bytes;
    /* 0 when all bytes are in the peer's memory, or an error code. */
    int32_t status;
    uint32_t reserved;
} host_completion;

enum {
    /* All of a submission's data is in our memory. It is not said of one of which a write was refused. */
    HOST_ARRIVED = 1,
    /* The peer is proven gone: none of its writes will land any more. */
    HOST_PEER_GONE = 2
};

/* Something that a peer did to us. */
typedef struct host_notification {
    /* HOST_ARRIVED or HOST_PEER_GONE. */
    uint32_t kind;
    /* Bytes of `payload` that count. */
    uint32_t length;
    /* Bytes of `peer_name` that count. */
    uint32_t peer_name_length;
    uint32_t reserved;
    uint8_t payload[HOST_NOTIFICATION_BYTES];
    /* The name that the peer was opened with. */
    uint8_t peer_name[64];
} host_notification;

/* What an instance can carry at once. */
typedef struct host_transfer_limits {
    /* Most writes in one submission. */
    uint32_t max_writes;
    /* Most submissions accepted and not yet polled. */
    uint32_t max_submissions;
    /* Writes of fewer bytes are so slow that the host collects them first; 0 when unknown. */
    uint64_t short_writes;
    /* Zero. */
    uint64_t reserved[5];
} host_transfer_limits;

typedef struct host_transfer_role {
    /* Bytes of this struct: functions that a newer header appends are absent from an older plugin. */
    uint64_t size;
    int32_t (*open)(const host_opening *opening, void **instance, host_error *error);
    /* Frees the instance. Called once, after shutdown(). */
    void (*close)(void *instance);
    void (*limits)(void *instance, host_transfer_limits *limits);
    int32_t (*register_memory)(void *instance, const host_memory *memory, uint32_t *region, host_error *error);
    /* When it returns 0, no peer's write lands in the region any more. HOST_TIMEOUT: not proven, and the region is still registered. */
    int32_t (*deregister_memory)(void *instance, uint32_t region, host_error *error);
    /* Writes what a peer needs to connect to us to `bytes`, if `room` is enough, and its length to `length` in any case. */
    int32_t (*endpoint)(void *instance, uint8_t *bytes, size_t room, size_t *length, host_error *error);
    /* Again under the same name it replaces a connection that was lost: the id is a new one, and the old one is then unknown. */
    int32_t (*connect)(
        void *instance, host_text name, const uint8_t *endpoint, size_t length, uint32_t *peer, host_error *error);
    /* A fence: when it returns, nothing from or to this peer is in flight, and its late writes land nowhere. */
    int32_t (*disconnect)(void *instance, uint32_t peer, host_error *error);
    /* Hot. Starts a batch; 0 or a code. HOST_WOULD_BLOCK: nothing was started. */
    int32_t (*submit)(void *instance, const host_submission *submission, const host_write *writes, size_t count);
    /* Hot. Moves finished submissions into `completions`; how many, or a code. */
    int32_t (*poll)(void *instance, host_completion *completions, size_t room);
    /* Hot. Moves what peers did into `notifications`; how many, or a code. */
    int32_t (*notifications)(void *instance, host_notification *notifications, size_t room);
    /*
     * Asks that what has not started never starts; all of it still ends in its completions. 0, or HOST_INVALID_ARGUMENT for a tag that
     * is not in flight. May be NULL: nothing is cancelled.
     */
    int32_t (*cancel)(void *instance, uint64_t tag);
    /* Hot. 1 when nothing of this tag is in flight any more, 0 not yet. */
    int32_t (*settled)(void *instance, uint64_t tag);
    /* A descriptor that is readable while there is something to poll, HOST_WAKES, or -1: the host polls on a timer. May be NULL: -1. */
    int32_t (*event_fd)(void *instance);
    /* Stops all threads of the instance within so many milliseconds; then every call answers HOST_CLOSED. */
    int32_t (*shutdown)(void *instance, uint64_t deadline_ms, host_error *error);
} host_transfer_role;

/* ---- The tier role: pages in storage, by keys. docs/plugins/tier.md ---- */

typedef struct host_key {
    uint8_t bytes[32];
} host_key;

/* One page to write or read: a key and its place in registered memory. */
typedef struct host_tier_page {
    host_key key;
    uint32_t region;
    /* At least 1; a get wants exactly as many bytes as were put. */
    uint32_t length;
    uint64_t offset;
} host_tier_page;

enum {
    /* Status of a page: not there. Nothing was written to memory. */
    HOST_MISSING = 0,
    /* Status of a page: it was there, and its bytes are in memory (get), or were removed. */
    HOST_FOUND = 1,
    /* Status of a page: its value is stored. */
    HOST_STORED = 1
};

/* How one page of a batch ended. */
typedef struct host_tier_completion {
    uint64_t tag;
    /* Which of the batch, counted from 0. */
    uint32_t page;
    /* HOST_FOUND, HOST_STORED, HOST_MISSING, or an error code. */
    int32_t status;
    /* Bytes of the value, where the operation knows them. */
    uint64_t bytes;
} host_tier_completion;

typedef struct host_tier_limits {
    /* Most pages or keys in one batch. */
    uint32_t max_pages;
    /* Most batches accepted and not yet polled to their last page. */
    uint32_t max_batches;
    /* Longest value, in bytes. */
    uint64_t max_value;
    /* Offsets and lengths are multiples of this; at least 1. */
    uint64_t alignment;
    /* Zero. */
    uint64_t reserved[4];
} host_tier_limits;

typedef struct host_tier_usage {
    uint64_t values;
    uint64_t bytes;
    /* Most bytes; 0 when there is no known bound. */
    uint64_t capacity;
    /* Zero. */
    uint64_t reserved[5];
} host_tier_usage;

typedef struct host_scanned {
    /* Keys written. */
    uint32_t keys;
    uint32_t reserved;
    /* Where the next step goes on; 0 when this was the last. */
    uint64_t cursor;
} host_scanned;

typedef struct host_tier_role {
    /* Bytes of this struct. */
    uint64_t size;
    int32_t (*open)(const host_opening *opening, void **instance, host_error *error);
    /* Frees the instance. Called once, after shutdown(). */
    void (*close)(void *instance);
    void (*limits)(void *instance, host_tier_limits *limits);
    int32_t (*register_memory)(void *instance, const host_memory *memory, uint32_t *region, host_error *error);
    /* When it returns, the tier touches none of the region any more. */
    int32_t (*deregister_memory)(void *instance, uint32_t region, host_error *error);
    /* Hot, as get, put and remove: 0, or HOST_WOULD_BLOCK when full; an accepted batch ends in one completion for each page. */
    int32_t (*exists)(void *instance, uint64_t tag, const host_key *keys, size_t count);
    int32_t (*get)(void *instance, uint64_t tag, const host_tier_page *pages, size_t count);
    /* A reader sees all of a value or none of it, also after a crash. */
    int32_t (*put)(void *instance, uint64_t tag, const host_tier_page *pages, size_t count);
    int32_t (*remove)(void *instance, uint64_t tag, const host_key *keys, size_t count);
    /* Hot. Moves finished pages into `completions`; how many, or a code. */
    int32_t (*poll)(void *instance, host_tier_completion *completions, size_t room);
    /*
     * Asks that what has not started never starts; all of it still ends in its completions. 0, or HOST_INVALID_ARGUMENT for a tag that
     * is not in flight. May be NULL: nothing is cancelled.
     */
    int32_t (*cancel)(void *instance, uint64_t tag);
    /* Hot. 1 when nothing of this tag touches memory any more, 0 not yet. */
    int32_t (*settled)(void *instance, uint64_t tag);
    /* Writes the next keys from `cursor` on; 0 starts. May be NULL: the store cannot list. */
    int32_t (*scan)(
        void *instance, uint64_t cursor, host_key *keys, size_t room, host_scanned *scanned, host_error *error);
    /* May be NULL. */
    int32_t (*usage)(void *instance, host_tier_usage *usage, host_error *error);
    /* As in host_transfer_role. */
    int32_t (*event_fd)(void *instance);
    int32_t (*shutdown)(void *instance, uint64_t deadline_ms, host_error *error);
} host_tier_role;

/* ---- The allocator role: which components a model's KV has in the pool, and which pages they are handed. docs/plugins/allocator.md ---- */

enum {
    /* The layers attend to every earlier token. */
    HOST_LAYERS_FULL = 0,
    /* The layers attend to the newest tokens of a window. */
    HOST_LAYERS_WINDOW = 1,
    /* The layers keep a state of fixed size for each sequence. */
    HOST_LAYERS_STATE = 2
};

/* Layers of a model that keep the same of a sequence. */
typedef struct host_layer_group {
    /* HOST_LAYERS_FULL, ... */
    uint32_t kind;
    uint32_t layers;
    /* Of HOST_LAYERS_WINDOW: tokens that a layer attends to, the newest included; else 0. */
    uint32_t window;
    /* Pool pages that hold what the group keeps of one page of tokens; of HOST_LAYERS_STATE, one state. At least 1. */
    uint32_t parts;
} host_layer_group;

enum {
    /* The component retains every token, as long as the sequence lives. */
    HOST_RETAINS_ALL = 0,
    /* The newest `tokens` tokens. */
    HOST_RETAINS_NEWEST = 1,
    /* A state of fixed size for each sequence. */
    HOST_RETAINS_STATE = 2
};

/* What the allocator declares of one group of layers. */
typedef struct host_component {
    /* Its name in take() and give(). */
    uint32_t id;
    /* Place of its group in the opening. Each group has one component. */
    uint32_t group;
    /* HOST_RETAINS_ALL, ... */
    uint32_t retains;
    /* Of HOST_RETAINS_NEWEST: how many tokens, at least the group's window; else 0. */
    uint32_t tokens;
    /* Its budget: the most pages that it has at a time, each `parts` pool pages. */
    uint32_t pages;
    /* Zero. */
    uint32_t reserved[3];
} host_component;

typedef struct host_pool_opening {
    /* Bytes of this struct. */
    uint64_t size;
    host_opening opening;
    /* Tokens in a page, at least 1. */
    uint32_t page_tokens;
    /* Pages of the pool, named 0, 1, .. */
    uint32_t pages;
    const host_layer_group *groups;
    /* 1 to 16. */
    uint64_t groups_count;
} host_pool_opening;

/* All functions but open() and close() are hot. */
typedef struct host_allocator_role {
    /* Bytes of this struct. */
    uint64_t size;
    int32_t (*open)(const host_pool_opening *opening, void **instance, host_error *error);
    void (*close)(void *instance);
    /* Writes one component for each group; how many. Always the same answer of one instance. */
    int32_t (*components)(void *instance, host_component *components, size_t room);
    /*
     * Takes `count` pool pages for a component: 0, or HOST_WOULD_BLOCK when there are fewer or its budget is exceeded, or
     * HOST_INVALID_ARGUMENT for an unknown component or a `count` that is no multiple of the group's parts. All or none.
     */
    int32_t (*take)(void *instance, uint32_t component, uint32_t *pages, size_t count);
    /* Gives pool pages back: all, or none and HOST_INVALID_ARGUMENT for one that is free, named twice, another component's or unknown. */
    int32_t (*give)(void *instance, uint32_t component, const uint32_t *pages, size_t count);
} host_allocator_role;

/* ---- The plugin. ---- */

typedef struct host_plugin {
    /* HOST_PLUGIN_MAGIC */
    char magic[8];
    /* Bytes of this struct. */
    uint64_t size;
    /* The manifest, as in the note. */
    const char *manifest;
    const char *manifest_end;
    /* Takes the host's services. May be NULL. Called once for each loaded file, before everything else. */
    void (*attach)(const host_services *services);
    /* Says whether open() of this role would take these settings, and starts nothing. May be NULL. */
    int32_t (*check_config)(host_text role, const host_opening *opening, host_error *error);
    /* NULL for the roles that the plugin does not play. */
    const host_transfer_role *transfer;
    const host_tier_role *tier;
    const host_allocator_role *allocator;
} host_plugin;

#define HOST_PLUGIN_VISIBLE __attribute__((visibility("default")))

/* The symbol that the host looks up. */
HOST_PLUGIN_VISIBLE extern const host_plugin host_plugin_c;

/* The note; see HOST_PLUGIN_MANIFEST. */
extern const char host_plugin_manifest[] __attribute__((visibility("hidden")));
extern const char host_plugin_manifest_end[] __attribute__((visibility("hidden")));

/* The first fields of `host_plugin_c`. */
#define HOST_PLUGIN_HEADER \
    HOST_PLUGIN_MAGIC, sizeof(host_plugin), host_plugin_manifest, host_plugin_manifest_end

#if defined(__x86_64__)
#define HOST_PLUGIN_MACHINE "x86_64"
#elif defined(__aarch64__)
#define HOST_PLUGIN_MACHINE "aarch64"
#else
#error "host runs on x86_64 and aarch64"
#endif

#if defined(__GLIBC__)
#define HOST_PLUGIN_TARGET HOST_PLUGIN_MACHINE "-unknown-linux-gnu"
#else
#define HOST_PLUGIN_TARGET HOST_PLUGIN_MACHINE "-unknown-linux-musl"
#endif

#if defined(__clang__)
#define HOST_PLUGIN_COMPILER __VERSION__
#else
#define HOST_PLUGIN_COMPILER "gcc " __VERSION__
#endif

/*
 * Writes the manifest into the library: PATH is that of the author's plugin.toml, as a literal, absolute or relative to the folder
 * where the compiler runs; absolute under -flto, where the linker reads it. [api] and [build] are filled in here. Once in a library,
 * outside of functions.
 */
#define HOST_PLUGIN_MANIFEST(PATH) \
    __asm__( \
        ".pushsection .note.host,\"a\",%note\n" \
        ".balign 4\n" \
        ".long 9\n" \
        ".long host_plugin_manifest_end-host_plugin_manifest\n" \
        ".long 1\n" \
        ".asciz \"HOSTPLUG\"\n" \
        ".balign 4\n" \
        ".hidden host_plugin_manifest\n" \
        ".globl host_plugin_manifest\n" \
        "host_plugin_manifest:\n" \
        ".incbin \"" PATH "\"\n" \
        ".ascii \"\\n[api]\\nversion = '" HOST_PLUGIN_API "'\\n\\n[build]\\nabi = 'c'\\npanic = 'unwind'\\ntarget = '" \
        HOST_PLUGIN_TARGET "'\\nrustc = ''\\ncompiler = '" HOST_PLUGIN_COMPILER "'\\nsymbol = 'host_plugin_c'\\n\"\n" \
        ".balign 4, 10\n" \
        ".hidden host_plugin_manifest_end\n" \
        ".globl host_plugin_manifest_end\n" \
        "host_plugin_manifest_end:\n" \
        ".popsection\n");

/* ---- Helpers. ---- */

/* Writes why something failed, as printf does, and returns `code`. Lower case, no full stop: what happened, to what, what to do. */
__attribute__((format(printf, 3, 4))) static inline int32_t host_fail(
    host_error *error, int32_t code, const char *format, ...) {
    if (error != NULL && error->room > 0) {
        va_list arguments;
        va_start(arguments, format);
        int length = vsnprintf(error->text, error->room, format, arguments);
        va_end(arguments);
        /* The last byte is the terminating zero's. */
        error->length = length < 0 ? 0 : (size_t)length < error->room ? (size_t)length : error->room - 1;
    }
    return code;
}

static inline int host_text_is(host_text text, const char *word) {
    return text.length == strlen(word) && memcmp(text.data, word, text.length) == 0;
}

/* The setting with this key, or NULL. */
static inline const host_setting *host_find(const host_opening *opening, const char *key) {
    for (uint64_t at = 0; at < opening->settings_count; at++) {
        if (host_text_is(opening->settings[at].key, key)) {
            return &opening->settings[at];
        }
    }
    return NULL;
}

/* The integer or boolean with this key, or `otherwise`. The host has checked its type. */
static inline int64_t host_integer(const host_opening *opening, const char *key, int64_t otherwise) {
    const host_setting *found = host_find(opening, key);
    return found == NULL ? otherwise : found->integer;
}

/* The string with this key; empty when there is none. */
static inline host_text host_string(const host_opening *opening, const char *key) {
    const host_setting *found = host_find(opening, key);
    host_text none = {"", 0};
    return found == NULL ? none : found->text;
}

/*
 * Components that share the whole pool, one for each group of the opening: each may have as much of it as is there, in whole pages of
 * its own. How many, or HOST_INVALID_ARGUMENT for too little room or layers of a kind that this header does not have.
 */
static inline int32_t host_share_pool(const host_pool_opening *opening, host_component *components, size_t room) {
    if (opening->groups_count > room) {
        return HOST_INVALID_ARGUMENT;
    }
    for (uint32_t at = 0; at < opening->groups_count; at++) {
        const host_layer_group *of = &opening->groups[at];
        host_component component = {at, at, HOST_RETAINS_ALL, 0, opening->pages / (of->parts > 0 ? of->parts : 1), {0, 0, 0}};
        switch (of->kind) {
        case HOST_LAYERS_FULL:
            break;
        case HOST_LAYERS_WINDOW:
            component.retains = HOST_RETAINS_NEWEST;
            component.tokens = of->window;
            break;
        case HOST_LAYERS_STATE:
            component.retains = HOST_RETAINS_STATE;
            break;
        default:
            return HOST_INVALID_ARGUMENT;
        }
        components[at] = component;
    }
    return (int32_t)opening->groups_count;
}

/* Whether a line of this level would be written; `services` may be NULL. */
static inline int host_logs(const host_services *services, uint32_t level) {
    return services != NULL && level <= __atomic_load_n(services->level, __ATOMIC_RELAXED);
}

/* Writes a line into the host's log, as printf does; `services` may be NULL. */
__attribute__((format(printf, 4, 5))) static inline void host_log(
    const host_services *services, uint32_t level, const char *target, const char *format, ...) {
    if (!host_logs(services, level)) {
        return;
    }
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (length > 0) {
        host_text from = {target, strlen(target)};
        host_text text = {line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1};
        services->log(services->host, level, from, text);
    }
}

/* Adds to a counter or gauge; hot. */
static inline void host_add(uint64_t *word, uint64_t count) {
    __atomic_fetch_add(word, count, __ATOMIC_RELAXED);
}

/* Replaces the value of a gauge; hot. */
static inline void host_set(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* ---- Checks. ---- */

#ifdef __cplusplus
#define HOST_PLUGIN_ASSERT static_assert
#else
#define HOST_PLUGIN_ASSERT _Static_assert
#endif

HOST_PLUGIN_ASSERT(sizeof(void *) == 8, "host runs on machines of 64 bits");
HOST_PLUGIN_ASSERT(sizeof(host_write) == 32, "host_write has 32 bytes");
HOST_PLUGIN_ASSERT(sizeof(host_notification) == 128, "host_notification has 128 bytes");
HOST_PLUGIN_ASSERT(sizeof(host_tier_page) == 48, "host_tier_page has 48 bytes");
HOST_PLUGIN_ASSERT(sizeof(host_tier_completion) == 24, "host_tier_completion has 24 bytes");

#ifdef __cplusplus
}
#endif

#endif
