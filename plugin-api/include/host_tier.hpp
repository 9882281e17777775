// What every storage tier in C++ needs around its store: a queue of batches, threads, registered memory, completions.
//
// You write calls that block and that are about one value each. host::QueuedTier makes a tier of them:
//
//     #include "host_tier.hpp"
//
//     HOST_PLUGIN_MANIFEST("plugin.toml")
//
//     class MyStore : public host::Store {
//     public:
//         explicit MyStore(const host::Opening &opening);
//         host::QueueLimits limits() const override;
//         int32_t get(const host_key &key, uint8_t *to, uint32_t length, uint64_t *bytes) override;
//         int32_t put(const host_key &key, const uint8_t *from, uint32_t length) override;
//         int32_t exists(const host_key &key, uint64_t *bytes) override;
//         int32_t remove(const host_key &key, uint64_t *bytes) override;
//     };
//
//     const host_plugin host_plugin_c = host::Plugin().tier<host::QueuedTier<MyStore>>();
//
// Your part:
// - Several threads call the store at once. At most QueueLimits::writers of them put or remove.
// - The calls may block, allocate and throw. host::Error ends that page with its code, std::bad_alloc with HOST_NO_RESOURCE, any
//   other exception with HOST_INTERNAL; all but full stores are logged. The other pages of the batch go on.
// - `to` and `from` lie in registered memory, stay there until the call returns, and have `length` bytes, from 1 to max_value.
// - A reader must see all of a value or none of it, also after a crash. That is yours to keep.
//
// The rest is done here:
// - Hot calls copy the batch into memory that was taken when the tier opened. They neither allocate nor wait for the store.
// - A page that names no region, leaves it, is too long or not aligned ends with HOST_INVALID_ARGUMENT and never reaches the store.
// - Each page ends in exactly one completion, also when its batch is cancelled. The host is woken for it.
// - deregister_memory() waits until no call of the store uses the region. Pages that still wait in the queue end with an error.
// - shutdown() lets the calls that run come to their end and starts no other. The store is destroyed after its last call.
//
// In plugin.toml write `threads = "own"`; `settled` among the capabilities holds, and `scan` where you wrote one.
#ifndef HOST_TIER_HPP
#define HOST_TIER_HPP

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "host_plugin.hpp"

namespace host __attribute__((visibility("hidden"))) {

// How much a tier takes at once. Asked once, when it opens.
struct QueueLimits {
    // Longest value, in bytes.
    uint64_t max_value = 64 << 20;
    // Offsets and lengths are multiples of this.
    uint64_t alignment = 1;
    // Most pages in one batch. A batch takes 48 bytes for each, when the tier opens.
    uint32_t max_pages = 256;
    // Most batches that the host has started and not yet polled.
    uint32_t max_batches = 64;
    // Threads that call the store.
    uint32_t threads = 4;
    // Most of them that put or remove at the same time; 0 leaves one for reading, if there are two.
    uint32_t writers = 0;
};

// A store of values by keys. See above.
class Store {
public:
    Store() = default;
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;
    virtual ~Store() = default;

    virtual QueueLimits limits() const { return QueueLimits(); }
    // HOST_FOUND, with all of the value in `to` and its length in `bytes`; HOST_MISSING, and `to` is as it was; or a code. A value
    // of another length than `length` is HOST_INVALID_ARGUMENT.
    virtual int32_t get(const host_key &key, uint8_t *to, uint32_t length, uint64_t *bytes) = 0;
    // HOST_STORED, also when the key was there, since values never change; or a code: HOST_NO_RESOURCE when the store is full.
    virtual int32_t put(const host_key &key, const uint8_t *from, uint32_t length) = 0;
    // HOST_FOUND, with the length of the value in `bytes`, or 0 where it is not known; HOST_MISSING; or a code.
    virtual int32_t exists(const host_key &key, uint64_t *bytes) = 0;
    // As exists().
    virtual int32_t remove(const host_key &key, uint64_t *bytes) = 0;
    // As in host_tier_role. Called by threads of the host. Class Cursors helps where keys have an order.
    virtual host_scanned scan(uint64_t, host_key *, size_t) { throw Error(HOST_UNSUPPORTED, "the store cannot list"); }
    virtual host_tier_usage usage() { throw Error(HOST_UNSUPPORTED, "the store does not count"); }
};

// Cursors of scans that go on behind a key: the host's cursor is a number, and the key that it stands for is kept here.
class Cursors {
public:
    // A cursor that stands for this key. Of those given out, the last 1024 are known.
    uint64_t behind(const host_key &key) {
        const std::lock_guard<std::mutex> lock(mutex_);
        keys_.emplace(++last_, key);
        if (keys_.size() > 1024) {
            keys_.erase(keys_.begin());
        }
        return last_;
    }
    // The key that a cursor stands for. Throws for a cursor that is not known.
    host_key key(uint64_t cursor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = keys_.find(cursor);
        if (found == keys_.end()) {
            throw Error(HOST_INVALID_ARGUMENT, "no scan gave out this cursor");
        }
        return found->second;
    }

private:
    std::mutex mutex_;
    uint64_t last_ = 0;
    std::map<uint64_t, host_key> keys_;
};

namespace detail {

// The queue of a tier, and the threads that empty it. `mutex_` is held for microseconds, never while the store is called.
class Queue : public Tier {
public:
    explicit Queue(std::unique_ptr<Store> store) : store_(std::move(store)), limits_(checked(store_->limits())) {
        const size_t room = size_t{limits_.max_batches} * limits_.max_pages;
        pages_.resize(room);
        done_.resize(room);
        batches_.resize(limits_.max_batches);
        regions_.reserve(MAX_REGIONS);
        for (std::vector<uint32_t> *list : {&free_, &lines_[READS], &lines_[WRITES]}) {
            list->reserve(limits_.max_batches);
        }
        for (uint32_t slot = limits_.max_batches; slot > 0; slot--) {
            free_.push_back(slot - 1);
        }
        threads_.reserve(limits_.threads);
        running_ = limits_.threads;
        try {
            while (threads_.size() < limits_.threads) {
                threads_.emplace_back([this] { run(); });
            }
        } catch (const std::system_error &error) {
            stop();
            throw Error(HOST_NO_RESOURCE, std::string("no thread can be started: ") + error.what());
        } catch (...) {
            // Threads that run may not be forgotten, for want of memory neither.
            stop();
            throw;
        }
    }

    // Waits for calls of the store that outlived their shutdown(): what they use is freed here.
    ~Queue() override { stop(); }

    host_tier_limits limits() override {
        return {limits_.max_pages, limits_.max_batches, limits_.max_value, limits_.alignment, {0, 0, 0, 0}};
    }

    uint32_t register_memory(const host_memory &memory) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
        if (memory.kind != HOST_DRAM) {
            throw Error(HOST_UNSUPPORTED, "only host memory can be registered");
        }
        const auto start = reinterpret_cast<uintptr_t>(memory.address);
        if (start == 0 || memory.length == 0 || start + memory.length < start) {
            throw Error(HOST_INVALID_ARGUMENT, "the memory is empty or leaves the address space");
        }
        if (regions_.size() == MAX_REGIONS || next_region_ == UINT32_MAX) {
            throw Error(HOST_NO_RESOURCE, std::to_string(regions_.size()) + " regions are registered");
        }
        regions_.push_back({next_region_, 0, false, static_cast<uint8_t *>(memory.address), memory.length});
        return next_region_++;
    }

    void deregister_memory(uint32_t id) override {
        std::unique_lock<std::mutex> lock(mutex_);
        open();
        Region *region = find(id);
        if (region == nullptr) {
            throw Error(HOST_INVALID_ARGUMENT, "no region has the id " + std::to_string(id));
        }
        // Nothing new begins in it.
        region->is_going = true;
        const auto unused = [&] {
            region = find(id);
            return region == nullptr || region->users == 0;
        };
        if (!ended_.wait_for(lock, std::chrono::seconds(30), unused)) {
            throw Error(HOST_TIMEOUT, "after 30 seconds the store still uses the region");
        }
        if (region != nullptr) {
            regions_.erase(regions_.begin() + (region - regions_.data()));
        }
    }

    int32_t exists(uint64_t tag, const host_key *keys, size_t count) override { return push_keys(EXISTS, tag, keys, count); }
    int32_t get(uint64_t tag, const host_tier_page *pages, size_t count) override { return push_pages(GET, tag, pages, count); }
    int32_t put(uint64_t tag, const host_tier_page *pages, size_t count) override { return push_pages(PUT, tag, pages, count); }
    int32_t remove(uint64_t tag, const host_key *keys, size_t count) override { return push_keys(REMOVE, tag, keys, count); }

    int32_t poll(host_tier_completion *completions, size_t room) override {
        const auto lock = hot();
        if (is_closed_) {
            return HOST_CLOSED;
        }
        int32_t count = 0;
        while (static_cast<size_t>(count) < room && done_count_ > 0) {
            const Done &done = done_[done_first_];
            completions[count++] = done.completion;
            if (--batches_[done.slot].unpolled == 0) {
                free_.push_back(done.slot);
            }
            done_first_ = done_first_ + 1 == done_.size() ? 0 : done_first_ + 1;
            done_count_--;
        }
        is_told_ = false;
        return count;
    }

    int32_t cancel(uint64_t tag) override {
        auto lock = hot();
        if (is_closed_) {
            return HOST_CLOSED;
        }
        int32_t answer = HOST_INVALID_ARGUMENT;
        bool tells = false;
        for (uint32_t slot = 0; slot < limits_.max_batches; slot++) {
            Batch &batch = batches_[slot];
            if (batch.unfinished == 0 || batch.tag != tag) {
                continue;
            }
            answer = 0;
            if (batch.next < batch.count) {
                std::vector<uint32_t> &line = lines_[batch.line()];
                line.erase(std::find(line.begin(), line.end(), slot));
            }
            while (batch.next < batch.count) {
                tells |= finish(slot, batch.next++, HOST_CANCELLED, 0);
            }
        }
        lock.unlock();
        if (tells) {
            wake();
        }
        return answer;
    }

    int32_t settled(uint64_t tag) override {
        const auto lock = hot();
        if (is_closed_) {
            return HOST_CLOSED;
        }
        const auto touches = [&](const Batch &batch) { return batch.unfinished > 0 && batch.tag == tag; };
        return std::none_of(batches_.begin(), batches_.end(), touches) ? 1 : 0;
    }

    host_scanned scan(uint64_t cursor, host_key *keys, size_t room) override {
        check_open();
        return store_->scan(cursor, keys, room);
    }

    host_tier_usage usage() override {
        check_open();
        return store_->usage();
    }

    int32_t event_fd() override { return HOST_WAKES; }

    void shutdown(uint64_t deadline_ms) override {
        std::unique_lock<std::mutex> lock(mutex_);
        is_closed_ = true;
        work_.notify_all();
        // A deadline far away would not fit the clock.
        const std::chrono::milliseconds patience(std::min<uint64_t>(deadline_ms, 1000ull * 3600 * 24));
        if (!ended_.wait_for(lock, patience, [this] { return running_ == 0; })) {
            throw Error(HOST_TIMEOUT, std::to_string(running_) + " threads of the tier still run");
        }
        lock.unlock();
        stop();
    }

private:
    enum Kind { EXISTS, GET, PUT, REMOVE };
    enum Line { READS, WRITES };
    static constexpr size_t MAX_REGIONS = 1024;
    static constexpr uint32_t READS_IN_A_ROW = 4;

    struct Region {
        uint32_t id;
        // Calls of the store that use it.
        uint32_t users;
        bool is_going;
        uint8_t *address;
        uint64_t length;
    };
    // Its pages are in `pages_`, from its own number times `max_pages` on.
    struct Batch {
        uint64_t tag = 0;
        Kind kind = EXISTS;
        uint32_t count = 0;
        // The first page that has not begun.
        uint32_t next = 0;
        // Pages that have not ended, and whose completion was not polled.
        uint32_t unfinished = 0;
        uint32_t unpolled = 0;
        Line line() const { return kind == EXISTS || kind == GET ? READS : WRITES; }
    };
    struct Done {
        host_tier_completion completion;
        uint32_t slot;
    };

    static QueueLimits checked(QueueLimits limits) {
        if (limits.max_pages == 0 || limits.max_batches == 0 || limits.max_value == 0 || limits.alignment == 0) {
            throw Error(HOST_CONFIG, "max_pages, max_batches, max_value and alignment must be at least 1");
        }
        if (limits.threads == 0 || limits.threads > 1024) {
            throw Error(HOST_CONFIG, "threads is " + std::to_string(limits.threads) + ", it must be from 1 to 1024");
        }
        const uint32_t others = limits.threads > 1 ? limits.threads - 1 : 1;
        limits.writers = limits.writers == 0 ? others : limits.writers;
        return limits;
    }

    void open() const {
        if (is_closed_) {
            throw Error(HOST_CLOSED, "the instance was shut down");
        }
    }

    void check_open() {
        const std::lock_guard<std::mutex> lock(mutex_);
        open();
    }

    // The lock, for hot calls: a thread of ours holds it for an instant, so that trying again is shorter than to sleep.
    std::unique_lock<std::mutex> hot() {
        for (int tries = 0; tries < 1000; tries++) {
            if (mutex_.try_lock()) {
                return std::unique_lock<std::mutex>(mutex_, std::adopt_lock);
            }
        }
        return std::unique_lock<std::mutex>(mutex_);
    }

    // Ids only grow, and regions lie in their order.
    Region *find(uint32_t id) {
        const auto found = std::lower_bound(
            regions_.begin(), regions_.end(), id, [](const Region &region, uint32_t other) { return region.id < other; });
        return found == regions_.end() || found->id != id ? nullptr : &*found;
    }

    template <class Copy> int32_t push(Kind kind, uint64_t tag, size_t count, Copy copy) {
        {
            const auto lock = hot();
            if (is_closed_) {
                return HOST_CLOSED;
            }
            if (count == 0 || count > limits_.max_pages) {
                return HOST_INVALID_ARGUMENT;
            }
            if (free_.empty()) {
                return HOST_WOULD_BLOCK;
            }
            const uint32_t slot = free_.back();
            free_.pop_back();
            const auto pages = static_cast<uint32_t>(count);
            Batch &batch = batches_[slot];
            batch.tag = tag;
            batch.kind = kind;
            batch.count = batch.unfinished = batch.unpolled = pages;
            batch.next = 0;
            copy(&pages_[size_t{slot} * limits_.max_pages]);
            lines_[batch.line()].push_back(slot);
        }
        if (count == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
        return 0;
    }

    int32_t push_pages(Kind kind, uint64_t tag, const host_tier_page *pages, size_t count) {
        return push(kind, tag, count, [=](host_tier_page *to) { std::copy_n(pages, count, to); });
    }

    int32_t push_keys(Kind kind, uint64_t tag, const host_key *keys, size_t count) {
        return push(kind, tag, count, [=](host_tier_page *to) {
            for (size_t at = 0; at < count; at++) {
                to[at] = host_tier_page();
                to[at].key = keys[at];
            }
        });
    }

    // Notes how a page ended; whether the host is to be woken.
    bool finish(uint32_t slot, uint32_t page, int32_t status, uint64_t bytes) {
        Batch &batch = batches_[slot];
        const size_t last = (done_first_ + done_count_++) % done_.size();
        done_[last] = {{batch.tag, page, status, bytes}, slot};
        batch.unfinished--;
        const bool tells = !is_told_;
        is_told_ = true;
        return tells;
    }

    // The line to take a page from; false when there is nothing to do now. Restores go before stores, which get their turn.
    bool choose(Line *line) const {
        const bool writes = !lines_[WRITES].empty() && writing_ < limits_.writers;
        const bool reads = !lines_[READS].empty();
        *line = writes && (!reads || reads_in_a_row_ >= READS_IN_A_ROW) ? WRITES : READS;
        return writes || reads;
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Line line = READS;
            work_.wait(lock, [&] { return is_closed_ || choose(&line); });
            if (is_closed_) {
                break;
            }
            const uint32_t slot = lines_[line].front();
            Batch &batch = batches_[slot];
            const uint32_t number = batch.next++;
            if (batch.next == batch.count) {
                lines_[line].erase(lines_[line].begin());
            }
            reads_in_a_row_ = line == READS ? reads_in_a_row_ + 1 : 0;
            const Kind kind = batch.kind;
            const host_tier_page page = pages_[size_t{slot} * limits_.max_pages + number];
            const bool has_data = kind == GET || kind == PUT;
            uint8_t *data = has_data ? take(page) : nullptr;
            int32_t status = HOST_INVALID_ARGUMENT;
            uint64_t bytes = 0;
            if (data != nullptr || !has_data) {
                writing_ += line == WRITES;
                lock.unlock();
                status = call(kind, page, data, &bytes);
                lock.lock();
                writing_ -= line == WRITES;
            }
            if (data != nullptr) {
                find(page.region)->users--;
                ended_.notify_all();
            }
            if (finish(slot, number, status, bytes)) {
                lock.unlock();
                wake();
                lock.lock();
            }
        }
        running_--;
        ended_.notify_all();
    }

    // Where a page lies, whose region stays until release; NULL when that is not inside of it.
    uint8_t *take(const host_tier_page &page) {
        Region *region = find(page.region);
        const bool fits = region != nullptr && !region->is_going && page.length > 0 && page.length <= limits_.max_value &&
                          page.offset <= region->length && page.length <= region->length - page.offset &&
                          page.offset % limits_.alignment == 0 && page.length % limits_.alignment == 0;
        if (!fits) {
            return nullptr;
        }
        region->users++;
        return region->address + page.offset;
    }

    int32_t call(Kind kind, const host_tier_page &page, uint8_t *data, uint64_t *bytes) noexcept {
        try {
            const int32_t status = one(kind, page, data, bytes);
            *bytes = status > 0 ? *bytes : 0;
            return std::min<int32_t>(status, HOST_FOUND);
        } catch (const Error &error) {
            tell(error.code(), error.what());
            return error.code() < 0 ? error.code() : HOST_INTERNAL;
        } catch (const std::bad_alloc &) {
            return HOST_NO_RESOURCE;
        } catch (const std::exception &error) {
            tell(HOST_INTERNAL, error.what());
        } catch (...) {
            tell(HOST_INTERNAL, "the store threw what is no std::exception");
        }
        return HOST_INTERNAL;
    }

    int32_t one(Kind kind, const host_tier_page &page, uint8_t *data, uint64_t *bytes) {
        int32_t status = HOST_INTERNAL;
        switch (kind) {
        case EXISTS: return store_->exists(page.key, bytes);
        case REMOVE: return store_->remove(page.key, bytes);
        case GET:
            status = store_->get(page.key, data, page.length, bytes);
            // Less than was asked for is no success.
            return status > 0 && *bytes != page.length ? HOST_INVALID_ARGUMENT : status;
        case PUT:
            status = store_->put(page.key, data, page.length);
            *bytes = page.length;
            if (status == HOST_MISSING) {
                throw Error(HOST_INTERNAL, "put() answered 0, which is no success: HOST_STORED is");
            }
            return status;
        }
        return status;
    }

    static void tell(int32_t code, const char *text) noexcept {
        try {
            log(code == HOST_NO_RESOURCE || code == HOST_WOULD_BLOCK ? HOST_LOG_DEBUG : HOST_LOG_WARN, "store", text);
        } catch (...) {
            // Without memory there is no line.
        }
    }

    // Ends all threads.
    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_closed_ = true;
        }
        work_.notify_all();
        const std::lock_guard<std::mutex> lock(stopping_);
        for (std::thread &thread : threads_) {
            if (thread.joinable()) {
                thread.join();
            }
        }
    }

    std::unique_ptr<Store> store_;
    const QueueLimits limits_;
    std::mutex mutex_;
    // Something to do; and a call of the store, or a thread, came to its end.
    std::condition_variable work_;
    std::condition_variable ended_;
    bool is_closed_ = false;
    // The host was woken and has not polled since.
    bool is_told_ = false;
    uint32_t running_ = 0;
    uint32_t writing_ = 0;
    uint32_t reads_in_a_row_ = 0;
    uint32_t next_region_ = 1;
    std::vector<Region> regions_;
    std::vector<Batch> batches_;
    std::vector<host_tier_page> pages_;
    // Numbers of batches: those unused, and those with pages that have not begun, in their order.
    std::vector<uint32_t> free_;
    std::vector<uint32_t> lines_[2];
    // A ring. Each page of each batch has room in it.
    std::vector<Done> done_;
    size_t done_first_ = 0;
    size_t done_count_ = 0;
    std::mutex stopping_;
    std::vector<std::thread> threads_;
};

} // namespace detail

// The tier of a class that derives from Store and is made of an Opening.
template <class Made> class QueuedTier final : public detail::Queue {
public:
    explicit QueuedTier(const Opening &opening) : Queue(std::make_unique<Made>(opening)) {}
};

} // namespace host

#endif
