// A fake for tests: a storage tier in C++ that keeps values in this process's memory, and throws where its configuration says.
// Batches are carried out inside the call that starts them. All memory is taken when it opens, because hot calls must not allocate.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "host_plugin.hpp"
#include "throwing.hpp"

#ifndef MANIFEST
#define MANIFEST "tier-cpp.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr size_t MAX_PAGES = 256;
constexpr size_t MAX_BATCHES = 64;
constexpr size_t MAX_VALUE = 64 << 10;
constexpr size_t MAX_REGIONS = 1024;
constexpr size_t SLOTS = 512;

host::Error closed() { return host::Error(HOST_CLOSED, "the instance was shut down"); }

class MemoryTier final : public host::Tier {
public:
    explicit MemoryTier(const host::Opening &opening)
        : throwing_(opening), slots_(SLOTS), values_(new uint8_t[SLOTS * MAX_VALUE]), stored_(HOST_COUNTER, "values_stored") {
        throwing_.at("open");
        regions_.reserve(MAX_REGIONS);
        done_.reserve(MAX_PAGES * MAX_BATCHES);
        host::log(HOST_LOG_INFO, "tier", std::to_string(SLOTS) + " values fit");
    }

    host_tier_limits limits() override {
        throwing_.at("limits");
        host_tier_limits limits = {};
        limits.max_pages = MAX_PAGES;
        limits.max_batches = MAX_BATCHES;
        limits.max_value = MAX_VALUE;
        limits.alignment = 1;
        return limits;
    }

    uint32_t register_memory(const host_memory &memory) override {
        throwing_.at("register_memory");
        const Lock lock(*this);
        if (memory.kind != HOST_DRAM) {
            throw host::Error(HOST_UNSUPPORTED, "only host memory can be registered");
        }
        const auto start = reinterpret_cast<uint64_t>(memory.address);
        if (start == 0 || memory.length == 0 || start + memory.length < start) {
            throw host::Error(HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
        }
        if (regions_.size() == MAX_REGIONS) {
            throw host::Error(HOST_NO_RESOURCE, std::to_string(MAX_REGIONS) + " regions are registered");
        }
        regions_.push_back({++last_region_, memory});
        return last_region_;
    }

    void deregister_memory(uint32_t region) override {
        const Lock lock(*this);
        const auto found = std::find_if(regions_.begin(), regions_.end(), [&](const Region &of) { return of.id == region; });
        if (found == regions_.end()) {
            throw host::Error(HOST_INVALID_ARGUMENT, "no region has the id " + std::to_string(region));
        }
        regions_.erase(found);
    }

    int32_t exists(uint64_t tag, const host_key *keys, size_t count) override {
        return batch(tag, count, [&](size_t at, uint64_t &bytes) {
            return look(keys[at], bytes) == nullptr ? HOST_MISSING : HOST_FOUND;
        });
    }

    int32_t get(uint64_t tag, const host_tier_page *pages, size_t count) override {
        throwing_.at("get");
        return batch(tag, count, [&](size_t at, uint64_t &bytes) { return get_one(pages[at], bytes); });
    }

    int32_t put(uint64_t tag, const host_tier_page *pages, size_t count) override {
        return batch(tag, count, [&](size_t at, uint64_t &bytes) { return put_one(pages[at], bytes); });
    }

    int32_t remove(uint64_t tag, const host_key *keys, size_t count) override {
        return batch(tag, count, [&](size_t at, uint64_t &bytes) {
            Slot *slot = look(keys[at], bytes);
            if (slot == nullptr) {
                return HOST_MISSING;
            }
            slot->is_used = false;
            return HOST_FOUND;
        });
    }

    int32_t poll(host_tier_completion *completions, size_t room) override {
        throwing_.at("poll");
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) {
            return HOST_CLOSED;
        }
        const size_t count = std::min(room, done_.size());
        std::copy_n(done_.begin(), count, completions);
        done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
        return static_cast<int32_t>(count);
    }

    int32_t settled(uint64_t) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return is_closed_ ? HOST_CLOSED : 1;
    }

    host_scanned scan(uint64_t cursor, host_key *keys, size_t room) override {
        throwing_.at("scan");
        const Lock lock(*this);
        if (cursor > SLOTS) {
            throw host::Error(HOST_INVALID_ARGUMENT, "no scan gave out this cursor");
        }
        host_scanned scanned = {};
        uint64_t at = cursor;
        for (; at < SLOTS && scanned.keys < room; at++) {
            if (slots_[at].is_used) {
                keys[scanned.keys++] = slots_[at].key;
            }
        }
        scanned.cursor = at < SLOTS ? at : 0;
        return scanned;
    }

    host_tier_usage usage() override {
        const Lock lock(*this);
        host_tier_usage usage = {};
        usage.capacity = SLOTS * MAX_VALUE;
        for (const Slot &slot : slots_) {
            usage.values += slot.is_used;
            usage.bytes += slot.is_used ? slot.length : 0;
        }
        return usage;
    }

    void shutdown(uint64_t) override {
        throwing_.at("shutdown");
        const std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
    }

private:
    struct Slot {
        bool is_used = false;
        host_key key = {};
        uint32_t length = 0;
    };
    struct Region {
        uint32_t id;
        host_memory memory;
    };

    // The lock of an instance that is open.
    class Lock {
    public:
        explicit Lock(MemoryTier &tier) : lock_(tier.mutex_) {
            if (tier.is_closed_) {
                throw closed();
            }
        }

    private:
        std::lock_guard<std::mutex> lock_;
    };

    // Where a page lies, or nullptr when that is not inside its region.
    uint8_t *place(const host_tier_page &page) const {
        for (const Region &of : regions_) {
            if (of.id == page.region) {
                const bool fits = page.length > 0 && page.length <= MAX_VALUE && page.offset <= of.memory.length &&
                                  page.length <= of.memory.length - page.offset;
                return fits ? static_cast<uint8_t *>(of.memory.address) + page.offset : nullptr;
            }
        }
        return nullptr;
    }

    uint8_t *value(const Slot *slot) { return values_.get() + static_cast<size_t>(slot - slots_.data()) * MAX_VALUE; }

    Slot *look(const host_key &key, uint64_t &bytes) {
        for (Slot &slot : slots_) {
            if (slot.is_used && memcmp(&slot.key, &key, sizeof key) == 0) {
                bytes = slot.length;
                return &slot;
            }
        }
        return nullptr;
    }

    int32_t get_one(const host_tier_page &page, uint64_t &bytes) {
        uint8_t *to = place(page);
        uint64_t length = 0;
        const Slot *slot = look(page.key, length);
        if (to == nullptr || (slot != nullptr && slot->length != page.length)) {
            return HOST_INVALID_ARGUMENT;
        }
        if (slot == nullptr) {
            return HOST_MISSING;
        }
        memcpy(to, value(slot), length);
        bytes = length;
        return HOST_FOUND;
    }

    int32_t put_one(const host_tier_page &page, uint64_t &bytes) {
        const uint8_t *from = place(page);
        if (from == nullptr) {
            return HOST_INVALID_ARGUMENT;
        }
        if (look(page.key, bytes) != nullptr) {
            return HOST_STORED;
        }
        const auto unused = std::find_if(slots_.begin(), slots_.end(), [](const Slot &slot) { return !slot.is_used; });
        if (unused == slots_.end()) {
            return HOST_NO_RESOURCE;
        }
        memcpy(value(&*unused), from, page.length);
        unused->is_used = true;
        unused->key = page.key;
        unused->length = page.length;
        bytes = page.length;
        stored_.add(1);
        return HOST_STORED;
    }

    template <class One> int32_t batch(uint64_t tag, size_t count, One one) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) {
            return HOST_CLOSED;
        }
        if (count == 0 || count > MAX_PAGES) {
            return HOST_INVALID_ARGUMENT;
        }
        if (done_.size() + count > MAX_PAGES * MAX_BATCHES) {
            return HOST_WOULD_BLOCK;
        }
        for (size_t at = 0; at < count; at++) {
            host_tier_completion done = {};
            done.tag = tag;
            done.page = static_cast<uint32_t>(at);
            done.status = one(at, done.bytes);
            done_.push_back(done);
        }
        return 0;
    }

    Throwing throwing_;
    std::mutex mutex_;
    bool is_closed_ = false;
    uint32_t last_region_ = 0;
    std::vector<Region> regions_;
    std::vector<Slot> slots_;
    std::unique_ptr<uint8_t[]> values_;
    std::vector<host_tier_completion> done_;
    host::Metric stored_;
};

} // namespace

const host_plugin host_plugin_c = host::Plugin().tier<MemoryTier>();
