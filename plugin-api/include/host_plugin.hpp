// The plugin API of `host` for C++17: classes over the tables of host_plugin.h. No exception crosses to the host.
//
//     #include "host_plugin.hpp"
//
//     HOST_PLUGIN_MANIFEST("plugin.toml")
//
//     class MyTier : public host::Tier { public: explicit MyTier(const host::Opening &opening); ... };
//
//     const host_plugin host_plugin_c = host::Plugin().tier<MyTier>();
//
// What a method does is said in host_plugin.h. A method that fails throws host::Error; any other exception counts as a defect:
// after it the instance answers HOST_PANICKED, with that exception's text, to everything, and the next method that runs is its
// destructor: it stops the threads that shutdown() would have stopped.
#ifndef HOST_PLUGIN_HPP
#define HOST_PLUGIN_HPP

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "host_plugin.h"

// Hidden: two plugins in one process share none of it. Build with -fvisibility=hidden, so that they share nothing of yours.
namespace host __attribute__((visibility("hidden"))) {

// A failure that the host tells its operator: a code of host_plugin.h, and what happened, to what, what to do.
class Error : public std::runtime_error {
public:
    // A code of 0 or more would be an answer, and counts as HOST_INTERNAL.
    Error(int32_t code, const std::string &text) : std::runtime_error(text), code_(code < 0 ? code : HOST_INTERNAL) {}
    int32_t code() const noexcept { return code_; }

private:
    int32_t code_;
};

inline std::string_view view(host_text text) {
    return text.length == 0 ? std::string_view() : std::string_view(text.data, text.length);
}

// What an instance is opened with.
class Opening {
public:
    explicit Opening(const host_opening &opening) : opening_(&opening) {}

    // This worker's name among all peers.
    std::string name() const { return std::string(view(opening_->name)); }
    // The string with this key; empty when there is none.
    std::string string(const char *key) const { return std::string(view(host_string(opening_, key))); }
    // The integer with this key.
    int64_t integer(const char *key, int64_t otherwise = 0) const { return host_integer(opening_, key, otherwise); }
    // The boolean with this key.
    bool boolean(const char *key, bool otherwise = false) const { return host_integer(opening_, key, otherwise) != 0; }
    // All of it.
    const host_opening &raw() const { return *opening_; }

private:
    const host_opening *opening_;
};

// The host's services; NULL where the plugin was not loaded by a host.
inline const host_services *services = nullptr;

inline void log(uint32_t level, const char *part, const std::string &text) {
    if (host_logs(services, level)) {
        services->log(services->host, level, host_text{part, strlen(part)}, host_text{text.data(), text.size()});
    }
}

// Tells the host that there is something to poll. For instances whose event_fd() answers HOST_WAKES.
inline void wake() {
    if (services != nullptr) {
        services->wake(services->host);
    }
}

// A number on the worker's /metrics.
class Metric {
public:
    // HOST_COUNTER or HOST_GAUGE.
    Metric(uint32_t kind, const char *name) {
        char text[256];
        host_error error = {text, sizeof text, 0};
        if (services != nullptr) {
            const int32_t code = services->word(services->host, kind, host_text{name, strlen(name)}, &word_, &error);
            if (code != 0) {
                throw Error(code, std::string(text, error.length));
            }
        }
    }
    void add(uint64_t count) {
        if (word_ != nullptr) {
            host_add(word_, count);
        }
    }
    void set(uint64_t value) {
        if (word_ != nullptr) {
            host_set(word_, value);
        }
    }

private:
    uint64_t *word_ = nullptr;
};

// What `cancel` answers where nothing can be cancelled, from what `settled` answers.
inline int32_t uncancelled(int32_t settled) { return settled > 0 ? int32_t{HOST_INVALID_ARGUMENT} : settled; }

// A transfer backend.
class Transfer {
public:
    Transfer() = default;
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;
    virtual ~Transfer() = default;

    virtual host_transfer_limits limits() = 0;
    virtual uint32_t register_memory(const host_memory &memory) = 0;
    virtual void deregister_memory(uint32_t region) = 0;
    virtual std::vector<uint8_t> endpoint() = 0;
    virtual uint32_t connect(std::string_view name, const uint8_t *endpoint, size_t length) = 0;
    virtual void disconnect(uint32_t peer) = 0;
    virtual int32_t submit(const host_submission &submission, const host_write *writes, size_t count) = 0;
    virtual int32_t poll(host_completion *completions, size_t room) = 0;
    virtual int32_t notifications(host_notification *notifications, size_t room) = 0;
    virtual int32_t settled(uint64_t tag) = 0;
    virtual void shutdown(uint64_t deadline_ms) = 0;
    // Cancels nothing: what is in flight goes on, as it may.
    virtual int32_t cancel(uint64_t tag) { return uncancelled(settled(tag)); }
    // The host polls on a timer.
    virtual int32_t event_fd() { return -1; }
};

// A storage tier.
class Tier {
public:
    Tier() = default;
    Tier(const Tier &) = delete;
    Tier &operator=(const Tier &) = delete;
    virtual ~Tier() = default;

    virtual host_tier_limits limits() = 0;
    virtual uint32_t register_memory(const host_memory &memory) = 0;
    virtual void deregister_memory(uint32_t region) = 0;
    virtual int32_t exists(uint64_t tag, const host_key *keys, size_t count) = 0;
    virtual int32_t get(uint64_t tag, const host_tier_page *pages, size_t count) = 0;
    virtual int32_t put(uint64_t tag, const host_tier_page *pages, size_t count) = 0;
    virtual int32_t remove(uint64_t tag, const host_key *keys, size_t count) = 0;
    virtual int32_t poll(host_tier_completion *completions, size_t room) = 0;
    virtual int32_t settled(uint64_t tag) = 0;
    virtual void shutdown(uint64_t deadline_ms) = 0;
    virtual int32_t cancel(uint64_t tag) { return uncancelled(settled(tag)); }
    virtual host_scanned scan(uint64_t, host_key *, size_t) { throw Error(HOST_UNSUPPORTED, "the store cannot list"); }
    virtual host_tier_usage usage() { throw Error(HOST_UNSUPPORTED, "the store does not count"); }
    virtual int32_t event_fd() { return -1; }
};

// A pool allocator.
class Allocator {
public:
    Allocator() = default;
    Allocator(const Allocator &) = delete;
    Allocator &operator=(const Allocator &) = delete;
    virtual ~Allocator() = default;

    virtual int32_t components(host_component *components, size_t room) = 0;
    virtual int32_t take(uint32_t component, uint32_t *pages, size_t count) = 0;
    virtual int32_t give(uint32_t component, const uint32_t *pages, size_t count) = 0;
};

namespace detail {

inline int32_t told(host_error *error, int32_t code, const char *text) { return host_fail(error, code, "%s", text); }

// Calls what may throw where there is no instance yet.
template <class Call> int32_t caught(host_error *error, Call call) noexcept {
    try {
        call();
        return 0;
    } catch (const Error &thrown) {
        return told(error, thrown.code(), thrown.what());
    } catch (const std::bad_alloc &) {
        return told(error, HOST_NO_RESOURCE, "no memory is left");
    } catch (const std::exception &thrown) {
        return told(error, HOST_PANICKED, thrown.what());
    } catch (...) {
        return told(error, HOST_PANICKED, "it threw what is no std::exception");
    }
}

// An instance behind a net.
template <class Role> class Guarded {
public:
    std::unique_ptr<Role> role;

    template <class Call> int32_t cold(host_error *error, Call call) noexcept {
        if (is_broken_.load(std::memory_order_relaxed)) {
            const std::lock_guard<std::mutex> lock(mutex_);
            return told(error, HOST_PANICKED, why_.c_str());
        }
        try {
            call(*role);
            return 0;
        } catch (const Error &thrown) {
            return told(error, thrown.code(), thrown.what());
        } catch (const std::exception &thrown) {
            return told(error, broken(thrown.what()), thrown.what());
        } catch (...) {
            const char *text = "it threw what is no std::exception";
            return told(error, broken(text), text);
        }
    }

    template <class Call> int32_t hot(Call call) noexcept {
        if (is_broken_.load(std::memory_order_relaxed)) {
            return HOST_PANICKED;
        }
        try {
            return call(*role);
        } catch (const Error &thrown) {
            return thrown.code();
        } catch (const std::exception &thrown) {
            return broken(thrown.what());
        } catch (...) {
            return broken("it threw what is no std::exception");
        }
    }

private:
    int32_t broken(const char *text) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!is_broken_.load(std::memory_order_relaxed)) {
            is_broken_.store(true, std::memory_order_relaxed);
            try {
                why_ = text;
                log(HOST_LOG_ERROR, "exception", std::string("an exception left a method: ") + text);
            } catch (...) {
                // Without memory there is no text.
            }
        }
        return HOST_PANICKED;
    }

    std::atomic<bool> is_broken_{false};
    std::mutex mutex_;
    std::string why_;
};

template <class Role> Guarded<Role> &of(void *instance) { return *static_cast<Guarded<Role> *>(instance); }

template <class Role> void close(void *instance) {
    // A destructor that throws ends the process, as everywhere in C++.
    delete &of<Role>(instance);
}

template <class Role, class Made> int32_t open(const host_opening *opening, void **instance, host_error *error) {
    return caught(error, [&] {
        auto guarded = std::make_unique<Guarded<Role>>();
        guarded->role = std::make_unique<Made>(Opening(*opening));
        *instance = guarded.release();
    });
}

template <class Role>
int32_t register_memory(void *instance, const host_memory *memory, uint32_t *region, host_error *error) {
    return of<Role>(instance).cold(error, [&](Role &role) { *region = role.register_memory(*memory); });
}

template <class Role> int32_t deregister_memory(void *instance, uint32_t region, host_error *error) {
    return of<Role>(instance).cold(error, [&](Role &role) { role.deregister_memory(region); });
}

template <class Role> int32_t cancel(void *instance, uint64_t tag) {
    return of<Role>(instance).hot([&](Role &role) { return role.cancel(tag); });
}

template <class Role> int32_t settled(void *instance, uint64_t tag) {
    return of<Role>(instance).hot([&](Role &role) { return role.settled(tag); });
}

template <class Role> int32_t event_fd(void *instance) {
    return of<Role>(instance).hot([](Role &role) { return role.event_fd(); });
}

template <class Role> int32_t shutdown(void *instance, uint64_t deadline_ms, host_error *error) {
    return of<Role>(instance).cold(error, [&](Role &role) { role.shutdown(deadline_ms); });
}

template <class Role, class Limits> void limits(void *instance, Limits *limits) {
    of<Role>(instance).hot([&](Role &role) {
        *limits = role.limits();
        return 0;
    });
}

// ---- The transfer role. ----

inline int32_t endpoint(void *instance, uint8_t *bytes, size_t room, size_t *length, host_error *error) {
    return of<Transfer>(instance).cold(error, [&](Transfer &role) {
        const std::vector<uint8_t> made = role.endpoint();
        *length = made.size();
        if (made.size() <= room && !made.empty()) {
            memcpy(bytes, made.data(), made.size());
        }
    });
}

inline int32_t connect(
    void *instance, host_text name, const uint8_t *endpoint, size_t length, uint32_t *peer, host_error *error) {
    return of<Transfer>(instance).cold(
        error, [&](Transfer &role) { *peer = role.connect(view(name), endpoint, length); });
}

inline int32_t disconnect(void *instance, uint32_t peer, host_error *error) {
    return of<Transfer>(instance).cold(error, [&](Transfer &role) { role.disconnect(peer); });
}

inline int32_t submit(void *instance, const host_submission *submission, const host_write *writes, size_t count) {
    return of<Transfer>(instance).hot([&](Transfer &role) { return role.submit(*submission, writes, count); });
}

inline int32_t poll_transfer(void *instance, host_completion *completions, size_t room) {
    return of<Transfer>(instance).hot([&](Transfer &role) { return role.poll(completions, room); });
}

inline int32_t notifications(void *instance, host_notification *notifications, size_t room) {
    return of<Transfer>(instance).hot([&](Transfer &role) { return role.notifications(notifications, room); });
}

template <class Made>
__attribute__((visibility("hidden"))) inline constexpr host_transfer_role transfer_role = {
    sizeof(host_transfer_role),
    open<Transfer, Made>,
    close<Transfer>,
    limits<Transfer, host_transfer_limits>,
    register_memory<Transfer>,
    deregister_memory<Transfer>,
    endpoint,
    connect,
    disconnect,
    submit,
    poll_transfer,
    notifications,
    cancel<Transfer>,
    settled<Transfer>,
    event_fd<Transfer>,
    shutdown<Transfer>,
};

// ---- The tier role. ----

inline int32_t exists(void *instance, uint64_t tag, const host_key *keys, size_t count) {
    return of<Tier>(instance).hot([&](Tier &role) { return role.exists(tag, keys, count); });
}

inline int32_t get(void *instance, uint64_t tag, const host_tier_page *pages, size_t count) {
    return of<Tier>(instance).hot([&](Tier &role) { return role.get(tag, pages, count); });
}

inline int32_t put(void *instance, uint64_t tag, const host_tier_page *pages, size_t count) {
    return of<Tier>(instance).hot([&](Tier &role) { return role.put(tag, pages, count); });
}

inline int32_t remove(void *instance, uint64_t tag, const host_key *keys, size_t count) {
    return of<Tier>(instance).hot([&](Tier &role) { return role.remove(tag, keys, count); });
}

inline int32_t poll_tier(void *instance, host_tier_completion *completions, size_t room) {
    return of<Tier>(instance).hot([&](Tier &role) { return role.poll(completions, room); });
}

inline int32_t scan(
    void *instance, uint64_t cursor, host_key *keys, size_t room, host_scanned *scanned, host_error *error) {
    return of<Tier>(instance).cold(error, [&](Tier &role) { *scanned = role.scan(cursor, keys, room); });
}

inline int32_t usage(void *instance, host_tier_usage *usage, host_error *error) {
    return of<Tier>(instance).cold(error, [&](Tier &role) { *usage = role.usage(); });
}

template <class Made>
__attribute__((visibility("hidden"))) inline constexpr host_tier_role tier_role = {
    sizeof(host_tier_role),
    open<Tier, Made>,
    close<Tier>,
    limits<Tier, host_tier_limits>,
    register_memory<Tier>,
    deregister_memory<Tier>,
    exists,
    get,
    put,
    remove,
    poll_tier,
    cancel<Tier>,
    settled<Tier>,
    scan,
    usage,
    event_fd<Tier>,
    shutdown<Tier>,
};

// ---- The allocator role. ----

template <class Made>
int32_t open_allocator(const host_pool_opening *opening, void **instance, host_error *error) {
    return caught(error, [&] {
        auto guarded = std::make_unique<Guarded<Allocator>>();
        guarded->role = std::make_unique<Made>(*opening);
        *instance = guarded.release();
    });
}

inline int32_t components(void *instance, host_component *components, size_t room) {
    return of<Allocator>(instance).hot([&](Allocator &role) { return role.components(components, room); });
}

inline int32_t take(void *instance, uint32_t component, uint32_t *pages, size_t count) {
    return of<Allocator>(instance).hot([&](Allocator &role) { return role.take(component, pages, count); });
}

inline int32_t give(void *instance, uint32_t component, const uint32_t *pages, size_t count) {
    return of<Allocator>(instance).hot([&](Allocator &role) { return role.give(component, pages, count); });
}

template <class Made>
__attribute__((visibility("hidden"))) inline constexpr host_allocator_role allocator_role = {
    sizeof(host_allocator_role), open_allocator<Made>, close<Allocator>, components, take, give,
};

inline void attach(const host_services *given) { services = given; }

template <void (*Check)(std::string_view role, const Opening &opening)>
int32_t check_config(host_text role, const host_opening *opening, host_error *error) {
    return caught(error, [&] { Check(view(role), Opening(*opening)); });
}

} // namespace detail

// What a library exports: `const host_plugin host_plugin_c = host::Plugin().tier<MyTier>();`
class Plugin {
public:
    Plugin() = default;

    // A class that derives from Transfer and is made of an Opening.
    template <class Made> Plugin &transfer() {
        plugin_.transfer = &detail::transfer_role<Made>;
        return *this;
    }
    // A class that derives from Tier and is made of an Opening.
    template <class Made> Plugin &tier() {
        plugin_.tier = &detail::tier_role<Made>;
        return *this;
    }
    // A class that derives from Allocator and is made of a host_pool_opening.
    template <class Made> Plugin &allocator() {
        plugin_.allocator = &detail::allocator_role<Made>;
        return *this;
    }
    // A function that throws Error when the constructor of this role would not take these settings, and starts nothing.
    template <void (*Check)(std::string_view role, const Opening &opening)> Plugin &check() {
        plugin_.check_config = detail::check_config<Check>;
        return *this;
    }
    operator host_plugin() const { return plugin_; }

private:
    host_plugin plugin_ = {HOST_PLUGIN_HEADER, detail::attach, nullptr, nullptr, nullptr, nullptr};
};

} // namespace host

#endif
