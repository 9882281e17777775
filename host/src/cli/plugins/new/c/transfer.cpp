// A transfer backend that copies between instances in one process: everything the contract asks for, and no network.
//
// The copy happens inside submit(), which keeps the example short. A real backend starts the work there, lets a thread or the
// hardware finish it, and reports it from poll(). All memory that hot calls need is taken when it opens.
//
// To make it yours: land() is where the bytes move, and an endpoint has to say how another machine reaches this one.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host_plugin.hpp"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr size_t MAX_WRITES = 1024;
constexpr size_t MAX_SUBMISSIONS = 256;
// Notifications that wait at a receiver. A sender is told to come again when there are so many.
constexpr size_t MAX_INBOX = 1024;
constexpr size_t MAX_REGIONS = 1024;
constexpr size_t MAX_PEERS = 1024;

// What others see of an instance.
struct Side {
    explicit Side(const std::string &name_, uint64_t number_) : name(name_), number(number_) {
        done.reserve(MAX_SUBMISSIONS);
        inbox.reserve(MAX_INBOX);
    }

    const std::string name;
    const uint64_t number;
    std::mutex mutex;
    bool is_closed = false;
    std::map<uint32_t, host_memory> regions;
    std::map<uint32_t, std::weak_ptr<Side>> peers;
    std::vector<host_completion> done;
    std::vector<host_notification> inbox;

    // Where a range of a region lies, or nullptr when that is not inside.
    uint8_t *place(uint32_t region, uint64_t offset, uint32_t length, const uint32_t *generation) const {
        const auto found = regions.find(region);
        if (found == regions.end()) {
            return nullptr;
        }
        const host_memory &memory = found->second;
        const bool fits = length > 0 && offset <= memory.length && length <= memory.length - offset &&
                          (generation == nullptr || *generation == memory.generation);
        return fits ? static_cast<uint8_t *>(memory.address) + offset : nullptr;
    }
};

// The instances that are open, so that an endpoint can be a number.
std::mutex instances_mutex;
std::vector<std::weak_ptr<Side>> instances;
uint64_t last_instance = 0;

std::shared_ptr<Side> opened(const std::string &name) {
    if (name.size() > sizeof host_notification::peer_name) {
        throw host::Error(HOST_INVALID_ARGUMENT, "the instance's name is longer than 64 bytes");
    }
    const std::lock_guard<std::mutex> lock(instances_mutex);
    const auto is_gone = [](const std::weak_ptr<Side> &of) { return of.expired(); };
    instances.erase(std::remove_if(instances.begin(), instances.end(), is_gone), instances.end());
    // Unique among all instances, also those of other processes.
    auto side = std::make_shared<Side>(name, (static_cast<uint64_t>(getpid()) << 32) + ++last_instance);
    instances.push_back(side);
    return side;
}

template <class Item> int32_t drain(std::vector<Item> &from, Item *to, size_t room) {
    const size_t count = std::min(room, from.size());
    std::copy_n(from.begin(), count, to);
    from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
    return static_cast<int32_t>(count);
}

class Loopback final : public host::Transfer {
public:
    explicit Loopback(const host::Opening &opening) : side_(opened(opening.name())) {}

    host_transfer_limits limits() override {
        host_transfer_limits limits = {};
        limits.max_writes = MAX_WRITES;
        limits.max_submissions = MAX_SUBMISSIONS;
        return limits;
    }

    uint32_t register_memory(const host_memory &memory) override {
        const Lock lock(*side_);
        if (memory.kind != HOST_DRAM) {
            throw host::Error(HOST_UNSUPPORTED, "only host memory can be registered");
        }
        const auto start = reinterpret_cast<uint64_t>(memory.address);
        if (start == 0 || memory.length == 0 || start + memory.length < start) {
            throw host::Error(HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
        }
        if (side_->regions.size() == MAX_REGIONS) {
            throw host::Error(HOST_NO_RESOURCE, std::to_string(MAX_REGIONS) + " regions are registered");
        }
        side_->regions[++last_id_] = memory;
        return last_id_;
    }

    void deregister_memory(uint32_t region) override {
        const Lock lock(*side_);
        if (side_->regions.erase(region) == 0) {
            throw host::Error(HOST_INVALID_ARGUMENT, "no region has the id " + std::to_string(region));
        }
    }

    std::vector<uint8_t> endpoint() override {
        const Lock lock(*side_);
        std::vector<uint8_t> bytes(sizeof side_->number);
        memcpy(bytes.data(), &side_->number, bytes.size());
        return bytes;
    }

    uint32_t connect(std::string_view name, const uint8_t *endpoint, size_t length) override {
        uint64_t number = 0;
        if (length != sizeof number) {
            const Lock lock(*side_);
            throw host::Error(HOST_VERSION, "the endpoint is not one of this backend");
        }
        memcpy(&number, endpoint, sizeof number);
        std::shared_ptr<Side> peer;
        {
            const std::lock_guard<std::mutex> lock(instances_mutex);
            for (const std::weak_ptr<Side> &of : instances) {
                const std::shared_ptr<Side> side = of.lock();
                peer = side != nullptr && side->number == number ? side : peer;
            }
        }
        const Lock lock(*side_);
        if (peer == nullptr) {
            throw host::Error(HOST_PEER_LOST, std::string(name) + " is not in this process");
        }
        if (side_->peers.size() == MAX_PEERS) {
            throw host::Error(HOST_NO_RESOURCE, std::to_string(MAX_PEERS) + " peers are connected");
        }
        side_->peers[++last_id_] = peer;
        return last_id_;
    }

    void disconnect(uint32_t peer) override {
        std::shared_ptr<Side> other;
        {
            const Lock lock(*side_);
            const auto found = side_->peers.find(peer);
            if (found == side_->peers.end()) {
                throw host::Error(HOST_INVALID_ARGUMENT, "no peer has the id " + std::to_string(peer));
            }
            other = found->second.lock();
            side_->peers.erase(found);
        }
        if (other == nullptr) {
            return;
        }
        // A copy holds both locks, so that none runs now. The other side must start none towards this instance.
        const std::lock_guard<std::mutex> lock(other->mutex);
        for (auto at = other->peers.begin(); at != other->peers.end();) {
            at = at->second.lock() == side_ ? other->peers.erase(at) : std::next(at);
        }
    }

    int32_t submit(const host_submission &submission, const host_write *writes, size_t count) override {
        if (count > MAX_WRITES || submission.notification_length > HOST_NOTIFICATION_BYTES) {
            return HOST_INVALID_ARGUMENT;
        }
        std::shared_ptr<Side> peer;
        {
            const std::lock_guard<std::mutex> lock(side_->mutex);
            if (side_->is_closed) {
                return HOST_CLOSED;
            }
            const auto found = side_->peers.find(submission.peer);
            if (found == side_->peers.end()) {
                return HOST_INVALID_ARGUMENT;
            }
            peer = found->second.lock();
        }
        if (peer == nullptr) {
            return HOST_PEER_LOST;
        }
        if (peer == side_) {
            const std::lock_guard<std::mutex> lock(side_->mutex);
            return run(*peer, submission, writes, count);
        }
        const std::scoped_lock lock(side_->mutex, peer->mutex);
        return run(*peer, submission, writes, count);
    }

    int32_t poll(host_completion *completions, size_t room) override {
        const std::lock_guard<std::mutex> lock(side_->mutex);
        return side_->is_closed ? int32_t{HOST_CLOSED} : drain(side_->done, completions, room);
    }

    int32_t notifications(host_notification *notifications, size_t room) override {
        const std::lock_guard<std::mutex> lock(side_->mutex);
        return side_->is_closed ? int32_t{HOST_CLOSED} : drain(side_->inbox, notifications, room);
    }

    int32_t settled(uint64_t) override {
        const std::lock_guard<std::mutex> lock(side_->mutex);
        return side_->is_closed ? int32_t{HOST_CLOSED} : 1;
    }

    void shutdown(uint64_t) override {
        const std::lock_guard<std::mutex> lock(side_->mutex);
        side_->is_closed = true;
    }

private:
    // The lock of an instance that is open.
    class Lock {
    public:
        explicit Lock(Side &side) : lock_(side.mutex) {
            if (side.is_closed) {
                throw host::Error(HOST_CLOSED, "the instance was shut down");
            }
        }

    private:
        std::lock_guard<std::mutex> lock_;
    };

    // Copies all writes, or none.
    int32_t land(const Side &peer, const host_write *writes, size_t count, uint64_t *bytes) const {
        const auto source = [&](const host_write &write) {
            return side_->place(write.source_region, write.source_offset, write.length, nullptr);
        };
        const auto target = [&](const host_write &write) {
            return peer.place(write.target_region, write.target_offset, write.length, &write.target_generation);
        };
        const auto fits = [&](const host_write &write) { return source(write) != nullptr && target(write) != nullptr; };
        if (!std::all_of(writes, writes + count, fits)) {
            return HOST_INVALID_ARGUMENT;
        }
        for (size_t at = 0; at < count; at++) {
            memmove(target(writes[at]), source(writes[at]), writes[at].length);
            *bytes += writes[at].length;
        }
        return 0;
    }

    // Copies, tells the peer, and queues the completion: or does nothing and says why. Called with both locks.
    int32_t run(Side &peer, const host_submission &submission, const host_write *writes, size_t count) {
        // Both may have changed while no lock was held.
        if (side_->is_closed) {
            return HOST_CLOSED;
        }
        if (side_->peers.count(submission.peer) == 0) {
            return HOST_INVALID_ARGUMENT;
        }
        const uint32_t length = submission.notification_length;
        if (side_->done.size() == MAX_SUBMISSIONS || (length > 0 && peer.inbox.size() == MAX_INBOX)) {
            return HOST_WOULD_BLOCK;
        }
        host_completion done = {submission.tag, 0, HOST_PEER_LOST, 0};
        if (!peer.is_closed) {
            done.status = land(peer, writes, count, &done.bytes);
        }
        if (done.status == 0 && length > 0) {
            host_notification made = {};
            made.kind = HOST_ARRIVED;
            made.length = length;
            made.peer_name_length = static_cast<uint32_t>(side_->name.size());
            memcpy(made.payload, submission.notification, length);
            memcpy(made.peer_name, side_->name.data(), side_->name.size());
            peer.inbox.push_back(made);
        }
        side_->done.push_back(done);
        return 0;
    }

    std::shared_ptr<Side> side_;
    // Of regions and peers, under the lock of the side.
    uint32_t last_id_ = 0;
};

} // namespace

const host_plugin host_plugin_c = host::Plugin().transfer<Loopback>();
