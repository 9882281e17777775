// A fake for tests: a transfer backend in C++ between the processes of one machine, which throws where its configuration says. The
// copy happens inside submit.
//
// What peers see of an instance is a block of memory behind a descriptor. An endpoint names the process and the descriptor. Peers open
// both the block and the memory that they write to under /proc.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "host_plugin.hpp"
#include "throwing.hpp"

#ifndef MANIFEST
#define MANIFEST "transfer-cpp.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr size_t MAX_WRITES = 1024;
constexpr size_t MAX_SUBMISSIONS = 256;
// Notifications that wait at a receiver. A sender is told to come again when there are so many.
constexpr size_t MAX_INBOX = 1024;
constexpr size_t MAX_REGIONS = 1024;
constexpr size_t MAX_PEERS = 1024;
constexpr char MAGIC[8] = {'C', 'P', 'P', 'W', 'I', 'R', 'E', '1'};

// How to reach an instance.
struct Endpoint {
    char magic[sizeof MAGIC];
    uint64_t instance;
    int32_t process;
    int32_t descriptor;
};

// The place of a sender that may write. Free when `connection` is 0.
struct Sender {
    uint64_t instance;
    uint64_t connection;
};

// Memory that peers may write to. Free when `id` is 0.
struct Region {
    uint32_t id;
    host_memory memory;

    bool holds(uint64_t offset, uint32_t length) const {
        return length > 0 && offset <= memory.length && length <= memory.length - offset;
    }
};

// What peers see of an instance. `mutex` is for all of it. A peer holds it while it writes, so that a fence only has to take it.
struct Block {
    pthread_mutex_t mutex;
    uint64_t instance;
    // Written and read without the lock, too: see shut() and is_shut().
    bool is_closed;
    uint64_t connections;
    Sender senders[MAX_PEERS];
    // Regions that are gone.
    uint64_t deregistered;
    Region regions[MAX_REGIONS];
    // A ring.
    size_t first;
    size_t waiting;
    host_notification inbox[MAX_INBOX];

    bool is_shut() const { return __atomic_load_n(&is_closed, __ATOMIC_SEQ_CST); }
    void shut() { __atomic_store_n(&is_closed, true, __ATOMIC_SEQ_CST); }

    const Region *region(uint32_t id) const {
        const Region *end = regions + MAX_REGIONS;
        const Region *found = std::find_if(regions, end, [&](const Region &region) { return region.id == id; });
        return id == 0 || found == end ? nullptr : found;
    }
};

static_assert(std::is_trivially_copyable<Block>::value, "several processes use it");

// How long a hot call waits for a peer that copies, and how long a fence does, in milliseconds.
constexpr long HOT_MS = 1;
constexpr long FENCE_MS = 2000;

// The lock of a block, unless a peer stands still while it holds the lock.
class Locked {
public:
    Locked(Block &block, long ms) : block_(block) {
        timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        const long nanoseconds = until.tv_nsec + ms % 1000 * 1000000;
        until.tv_sec += ms / 1000 + nanoseconds / 1000000000;
        until.tv_nsec = nanoseconds % 1000000000;
        const int code = pthread_mutex_timedlock(&block_.mutex, &until);
        if (code == EOWNERDEAD) {
            // The process that held it is gone. What it wrote last does not count yet.
            pthread_mutex_consistent(&block_.mutex);
        }
        is_held_ = code == 0 || code == EOWNERDEAD;
    }
    ~Locked() {
        if (is_held_) {
            pthread_mutex_unlock(&block_.mutex);
        }
    }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;

    bool is_held() const { return is_held_; }

    // Throws unless the lock is held.
    void must_be_held() const {
        if (!is_held_) {
            throw host::Error(HOST_TIMEOUT, "a peer stands still in the middle of a write");
        }
    }

private:
    Block &block_;
    bool is_held_;
};

class Descriptor {
public:
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(Descriptor &&other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor &operator=(Descriptor &&other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() {
        if (number_ >= 0) {
            close(number_);
        }
    }
    int number() const { return number_; }

private:
    int number_;
};

// A file of this process, or of another one, by its number there.
Descriptor opened(int32_t process, int32_t descriptor) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
    return Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

// A part of a file, mapped.
class Mapping {
public:
    Mapping(const Descriptor &file, uint64_t offset, uint64_t length) {
        skipped_ = offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
        length_ = static_cast<size_t>(length + skipped_);
        const auto from = static_cast<off_t>(offset - skipped_);
        start_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), from);
        if (start_ == MAP_FAILED) {
            throw host::Error(HOST_IO, std::string("memory cannot be mapped: ") + strerror(errno));
        }
    }
    Mapping(Mapping &&other) noexcept
        : start_(std::exchange(other.start_, MAP_FAILED)), length_(other.length_), skipped_(other.skipped_) {}
    Mapping &operator=(Mapping &&) = delete;
    ~Mapping() {
        if (start_ != MAP_FAILED) {
            munmap(start_, length_);
        }
    }
    uint8_t *bytes() const { return static_cast<uint8_t *>(start_) + skipped_; }
    Block &block() const { return *reinterpret_cast<Block *>(bytes()); }

private:
    void *start_ = MAP_FAILED;
    size_t length_ = 0;
    uint64_t skipped_ = 0;
};

// A peer that this instance writes to.
class Link {
public:
    // Takes a place among the senders of the peer.
    Link(const std::string &name, const Endpoint &peer, uint64_t self)
        : name_(name), process_(peer.process), block_(mapped(name, peer)), watch_(-1) {
        if (!is_here()) {
            watch_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process_, 0)));
            if (watch_.number() < 0) {
                throw host::Error(HOST_PEER_LOST, name + " is gone");
            }
        }
        const Locked lock(block(), FENCE_MS);
        lock.must_be_held();
        const auto end = block().senders + MAX_PEERS;
        place_ = std::find_if(block().senders, end, [](const Sender &sender) { return sender.connection == 0; });
        if (block().is_shut() || place_ == end) {
            throw host::Error(block().is_shut() ? HOST_PEER_LOST : HOST_NO_RESOURCE, name + " takes no connection");
        }
        connection_ = ++block().connections;
        *place_ = {self, connection_};
    }

    const std::string &name() const { return name_; }
    Block &block() const { return block_.block(); }

    // Whether the peer still lets us write. Called with the lock of its block.
    bool may_write() const { return !block().is_shut() && place_->connection == connection_; }

    // Whether the process of the peer has ended.
    bool is_gone() const {
        pollfd ended = {watch_.number(), POLLIN, 0};
        return !is_here() && poll(&ended, 1, 0) > 0;
    }

    // Gives the place back, unless the peer stands still. Nothing writes from there in any case.
    void leave() {
        const Locked lock(block(), HOT_MS);
        if (lock.is_held() && place_->connection == connection_) {
            *place_ = {0, 0};
        }
    }

    // Where the bytes of a write go, or nullptr when that is not inside of a region. Called with the lock of the block.
    uint8_t *target(const host_write &write) {
        const Region *region = block().region(write.target_region);
        if (region == nullptr || region->memory.generation != write.target_generation ||
            !region->holds(write.target_offset, write.length)) {
            return nullptr;
        }
        if (is_here()) {
            return static_cast<uint8_t *>(region->memory.address) + write.target_offset;
        }
        forget();
        auto found = regions_.find(region->id);
        if (found == regions_.end()) {
            const host_memory &memory = region->memory;
            const Descriptor file = opened(process_, memory.fd);
            found = regions_.emplace(region->id, Mapping(file, memory.fd_offset, memory.length)).first;
        }
        return found->second.bytes() + write.target_offset;
    }

private:
    static Mapping mapped(const std::string &name, const Endpoint &peer) {
        const Descriptor file = opened(peer.process, peer.descriptor);
        struct stat found;
        if (file.number() < 0 || fstat(file.number(), &found) != 0 || found.st_size != sizeof(Block)) {
            throw host::Error(HOST_PEER_LOST, name + " is gone");
        }
        Mapping block(file, 0, sizeof(Block));
        if (block.block().instance != peer.instance) {
            throw host::Error(HOST_PEER_LOST, name + " is gone, and its descriptor is another one's");
        }
        return block;
    }

    bool is_here() const { return process_ == getpid(); }

    // Unmaps the regions that are gone.
    void forget() {
        if (forgotten_ == block().deregistered) {
            return;
        }
        for (auto at = regions_.begin(); at != regions_.end();) {
            at = block().region(at->first) == nullptr ? regions_.erase(at) : std::next(at);
        }
        forgotten_ = block().deregistered;
    }

    std::string name_;
    int32_t process_;
    Mapping block_;
    // Readable when the process of the peer has ended.
    Descriptor watch_;
    Sender *place_ = nullptr;
    uint64_t connection_ = 0;
    // Memory of another process, by region.
    std::map<uint32_t, Mapping> regions_;
    uint64_t forgotten_ = 0;
};

class Wire final : public host::Transfer {
public:
    explicit Wire(const host::Opening &opening)
        : throwing_(opening), name_(named(opening)), file_(memfd_create("host-cpp-transfer", MFD_CLOEXEC)),
          mapping_(sized(file_), 0, sizeof(Block)), block_(mapping_.block()) {
        throwing_.at("open");
        done_.reserve(MAX_SUBMISSIONS);
        pthread_mutexattr_t shared;
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&block_.mutex, &shared);
        pthread_mutexattr_destroy(&shared);
        if (getrandom(&block_.instance, sizeof block_.instance, 0) != static_cast<ssize_t>(sizeof block_.instance)) {
            throw host::Error(HOST_IO, "the system gives no random number");
        }
    }

    // After a shutdown this changes nothing. Without one, peers that copy are waited for.
    ~Wire() override {
        block_.shut();
        const Locked locked(block_, FENCE_MS);
    }

    host_transfer_limits limits() override {
        throwing_.at("limits");
        host_transfer_limits limits = {};
        limits.max_writes = MAX_WRITES;
        limits.max_submissions = MAX_SUBMISSIONS;
        return limits;
    }

    uint32_t register_memory(const host_memory &memory) override {
        throwing_.at("register_memory");
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        if (memory.kind != HOST_DRAM) {
            throw host::Error(HOST_UNSUPPORTED, "only host memory can be registered");
        }
        if (memory.fd < 0) {
            throw host::Error(HOST_UNSUPPORTED, "only memory with a descriptor can be registered, which other processes open");
        }
        const auto start = reinterpret_cast<uint64_t>(memory.address);
        if (start == 0 || memory.length == 0 || start + memory.length < start) {
            throw host::Error(HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
        }
        const Locked locked(block_, FENCE_MS);
        locked.must_be_held();
        const auto end = block_.regions + MAX_REGIONS;
        const auto place = std::find_if(block_.regions, end, [](const Region &region) { return region.id == 0; });
        if (place == end) {
            throw host::Error(HOST_NO_RESOURCE, std::to_string(MAX_REGIONS) + " regions are registered");
        }
        *place = {++last_id_, memory};
        return last_id_;
    }

    void deregister_memory(uint32_t region) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        const Region *found = block_.region(region);
        if (found == nullptr) {
            throw host::Error(HOST_INVALID_ARGUMENT, "no region has the id " + std::to_string(region));
        }
        // A peer that copies holds it.
        const Locked locked(block_, FENCE_MS);
        locked.must_be_held();
        block_.regions[found - block_.regions].id = 0;
        block_.deregistered++;
    }

    std::vector<uint8_t> endpoint() override {
        throwing_.at("endpoint");
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        Endpoint here = {{}, block_.instance, getpid(), file_.number()};
        memcpy(here.magic, MAGIC, sizeof MAGIC);
        std::vector<uint8_t> bytes(sizeof here);
        memcpy(bytes.data(), &here, sizeof here);
        return bytes;
    }

    uint32_t connect(std::string_view name, const uint8_t *endpoint, size_t length) override {
        throwing_.at("connect");
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        Endpoint peer = {};
        if (length == sizeof peer) {
            memcpy(&peer, endpoint, sizeof peer);
        }
        if (memcmp(peer.magic, MAGIC, sizeof MAGIC) != 0) {
            throw host::Error(HOST_VERSION, "the endpoint is not one of this backend");
        }
        // A connection of this name that was lost is replaced.
        for (auto at = links_.begin(); at != links_.end();) {
            at = at->second.name() == name && is_lost(at->second) ? links_.erase(at) : std::next(at);
        }
        if (links_.size() == MAX_PEERS) {
            throw host::Error(HOST_NO_RESOURCE, std::to_string(MAX_PEERS) + " peers are connected");
        }
        links_.emplace(last_id_ + 1, Link(std::string(name), peer, block_.instance));
        return ++last_id_;
    }

    void disconnect(uint32_t peer) override {
        // Held while this instance copies, so that nothing to the peer is in flight.
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        const auto found = links_.find(peer);
        if (found == links_.end()) {
            throw host::Error(HOST_INVALID_ARGUMENT, "no peer has the id " + std::to_string(peer));
        }
        {
            // A peer that copies holds it, so that none of its writes runs, and none will begin.
            const Locked locked(block_, FENCE_MS);
            locked.must_be_held();
            const uint64_t instance = found->second.block().instance;
            for (Sender &sender : block_.senders) {
                sender = sender.instance == instance ? Sender() : sender;
            }
        }
        found->second.leave();
        links_.erase(found);
    }

    int32_t submit(const host_submission &submission, const host_write *writes, size_t count) override {
        throwing_.at("submit");
        if (count > MAX_WRITES || submission.notification_length > HOST_NOTIFICATION_BYTES) {
            return HOST_INVALID_ARGUMENT;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) {
            return HOST_CLOSED;
        }
        const auto found = links_.find(submission.peer);
        if (found == links_.end()) {
            return HOST_INVALID_ARGUMENT;
        }
        Link &link = found->second;
        if (link.is_gone()) {
            return HOST_PEER_LOST;
        }
        Block &peer = link.block();
        const Locked locked(peer, HOT_MS);
        if (!locked.is_held()) {
            return HOST_WOULD_BLOCK;
        }
        if (!link.may_write()) {
            return HOST_PEER_LOST;
        }
        const uint32_t length = submission.notification_length;
        if (done_.size() == MAX_SUBMISSIONS || (length > 0 && peer.waiting == MAX_INBOX)) {
            return HOST_WOULD_BLOCK;
        }
        host_completion done = {submission.tag, 0, 0, 0};
        done.status = land(link, writes, count, &done.bytes);
        if (done.status == 0 && length > 0) {
            host_notification &made = peer.inbox[(peer.first + peer.waiting) % MAX_INBOX];
            made = {};
            made.kind = HOST_ARRIVED;
            made.length = length;
            made.peer_name_length = static_cast<uint32_t>(name_.size());
            memcpy(made.payload, submission.notification, length);
            memcpy(made.peer_name, name_.data(), name_.size());
            peer.waiting++;
        }
        done_.push_back(done);
        return 0;
    }

    int32_t poll(host_completion *completions, size_t room) override {
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

    int32_t notifications(host_notification *notifications, size_t room) override {
        throwing_.at("notifications");
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) {
            return HOST_CLOSED;
        }
        const Locked locked(block_, HOT_MS);
        const size_t count = locked.is_held() ? std::min(room, block_.waiting) : 0;
        for (size_t at = 0; at < count; at++) {
            notifications[at] = block_.inbox[block_.first];
            block_.first = (block_.first + 1) % MAX_INBOX;
            block_.waiting--;
        }
        return static_cast<int32_t>(count);
    }

    int32_t settled(uint64_t) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return is_closed_ ? int32_t{HOST_CLOSED} : 1;
    }

    void shutdown(uint64_t) override {
        throwing_.at("shutdown");
        const std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
        for (auto &link : links_) {
            link.second.leave();
        }
        links_.clear();
        block_.shut();
        // A peer that copies holds it.
        const Locked locked(block_, FENCE_MS);
        locked.must_be_held();
    }

private:
    static std::string named(const host::Opening &opening) {
        if (opening.name().size() > sizeof host_notification::peer_name) {
            throw host::Error(HOST_INVALID_ARGUMENT, "the instance's name is longer than 64 bytes");
        }
        return opening.name();
    }

    // The file, as long as a block. Its bytes are zeros.
    static const Descriptor &sized(const Descriptor &file) {
        if (file.number() < 0 || ftruncate(file.number(), sizeof(Block)) != 0) {
            throw host::Error(HOST_NO_RESOURCE, std::string("there is no shared memory: ") + strerror(errno));
        }
        return file;
    }

    // Throws when the instance was shut down.
    void open() const {
        if (is_closed_) {
            throw host::Error(HOST_CLOSED, "the instance was shut down");
        }
    }

    static bool is_lost(const Link &link) {
        const Locked lock(link.block(), HOT_MS);
        return link.is_gone() || (lock.is_held() && !link.may_write());
    }

    // Copies all writes, or none. Called with both locks.
    int32_t land(Link &link, const host_write *writes, size_t count, uint64_t *bytes) {
        const auto source = [&](const host_write &write) -> uint8_t * {
            const Region *region = block_.region(write.source_region);
            const bool is_inside = region != nullptr && region->holds(write.source_offset, write.length);
            return is_inside ? static_cast<uint8_t *>(region->memory.address) + write.source_offset : nullptr;
        };
        const auto fits = [&](const host_write &write) {
            return source(write) != nullptr && link.target(write) != nullptr;
        };
        if (!std::all_of(writes, writes + count, fits)) {
            return HOST_INVALID_ARGUMENT;
        }
        for (size_t at = 0; at < count; at++) {
            memmove(link.target(writes[at]), source(writes[at]), writes[at].length);
            *bytes += writes[at].length;
        }
        return 0;
    }

    Throwing throwing_;
    const std::string name_;
    Descriptor file_;
    Mapping mapping_;
    Block &block_;
    // For all below, and held while this instance copies. Taken before the lock of any block; no two blocks are locked at once.
    std::mutex mutex_;
    bool is_closed_ = false;
    std::map<uint32_t, Link> links_;
    std::vector<host_completion> done_;
    // Of regions and peers.
    uint32_t last_id_ = 0;
};

} // namespace

const host_plugin host_plugin_c = host::Plugin().transfer<Wire>();
