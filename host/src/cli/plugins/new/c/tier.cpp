// A storage tier that keeps values in this process's memory.
//
// To make it yours: the methods of MemoryStore are where your storage goes. They may block: host_tier.hpp calls them from threads of
// its own, one value at a time, and keeps everything else of the contract.
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "host_tier.hpp"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

// One head of a page of a large model has less than 1 MiB.
constexpr uint64_t MAX_VALUE = 2 << 20;

// Values that fit; throws for settings that open() would not take.
size_t slots(const host::Opening &opening) {
    const int64_t slots = opening.integer("slots", 512);
    if (slots < 1 || slots > 1 << 16) {
        throw host::Error(HOST_CONFIG, "slots is " + std::to_string(slots) + ", it must be from 1 to 65536");
    }
    return static_cast<size_t>(slots);
}

struct Less {
    bool operator()(const host_key &one, const host_key &other) const {
        return memcmp(one.bytes, other.bytes, sizeof one.bytes) < 0;
    }
};

class MemoryStore final : public host::Store {
public:
    explicit MemoryStore(const host::Opening &opening) : slots_(slots(opening)) {}

    host::QueueLimits limits() const override {
        host::QueueLimits limits;
        limits.max_value = MAX_VALUE;
        return limits;
    }

    int32_t get(const host_key &key, uint8_t *to, uint32_t length, uint64_t *bytes) override {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        const auto found = values_.find(key);
        if (found == values_.end()) {
            return HOST_MISSING;
        }
        if (found->second.size() != length) {
            return HOST_INVALID_ARGUMENT;
        }
        memcpy(to, found->second.data(), length);
        *bytes = length;
        return HOST_FOUND;
    }

    int32_t put(const host_key &key, const uint8_t *from, uint32_t length) override {
        const std::unique_lock<std::shared_mutex> lock(mutex_);
        if (values_.count(key) == 0) {
            if (values_.size() == slots_) {
                return HOST_NO_RESOURCE;
            }
            values_.emplace(key, std::vector<uint8_t>(from, from + length));
            bytes_ += length;
        }
        return HOST_STORED;
    }

    int32_t exists(const host_key &key, uint64_t *bytes) override {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        const auto found = values_.find(key);
        *bytes = found == values_.end() ? 0 : found->second.size();
        return found == values_.end() ? HOST_MISSING : HOST_FOUND;
    }

    int32_t remove(const host_key &key, uint64_t *bytes) override {
        const std::unique_lock<std::shared_mutex> lock(mutex_);
        const auto found = values_.find(key);
        if (found == values_.end()) {
            return HOST_MISSING;
        }
        *bytes = found->second.size();
        bytes_ -= *bytes;
        values_.erase(found);
        return HOST_FOUND;
    }

    host_scanned scan(uint64_t cursor, host_key *keys, size_t room) override {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        auto at = cursor == 0 ? values_.begin() : values_.upper_bound(cursors_.key(cursor));
        host_scanned scanned = {};
        for (; at != values_.end() && scanned.keys < room; ++at) {
            keys[scanned.keys++] = at->first;
        }
        // Without room the scan is where it was.
        const bool moved = scanned.keys > 0;
        scanned.cursor = at == values_.end() ? 0 : moved ? cursors_.behind(keys[scanned.keys - 1]) : cursor;
        return scanned;
    }

    host_tier_usage usage() override {
        const std::shared_lock<std::shared_mutex> lock(mutex_);
        return {values_.size(), bytes_, slots_ * MAX_VALUE, {0, 0, 0, 0, 0}};
    }

private:
    const size_t slots_;
    std::shared_mutex mutex_;
    std::map<host_key, std::vector<uint8_t>, Less> values_;
    uint64_t bytes_ = 0;
    host::Cursors cursors_;
};

void check_config(std::string_view, const host::Opening &opening) { slots(opening); }

} // namespace

const host_plugin host_plugin_c = host::Plugin().tier<host::QueuedTier<MemoryStore>>().check<check_config>();
