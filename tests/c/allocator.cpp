// A fake for tests: an allocator in C++ with one free list, which throws where its configuration says.
#include <mutex>
#include <vector>

#include "host_plugin.hpp"
#include "throwing.hpp"

#ifndef MANIFEST
#define MANIFEST "allocator-cpp.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr size_t MAX_COMPONENTS = 16;
constexpr uint8_t UNUSED = 0xFF;

class ListAllocator final : public host::Allocator {
public:
    explicit ListAllocator(const host_pool_opening &opening) : throwing_(host::Opening(opening.opening)) {
        throwing_.at("open");
        host_component components[MAX_COMPONENTS];
        const int32_t count = host_share_pool(&opening, components, MAX_COMPONENTS);
        if (count < 0) {
            throw host::Error(count, "these layers are of a kind that is not known, or there are too many groups");
        }
        for (int32_t at = 0; at < count; at++) {
            const uint32_t parts = opening.groups[components[at].group].parts;
            accounts_.push_back({components[at], parts, uint64_t{components[at].pages} * parts});
        }
        owners_.resize(opening.pages, UNUSED);
        unused_.resize(opening.pages);
        // Low pages are handed out first.
        for (uint32_t page = 0; page < opening.pages; page++) {
            unused_[page] = opening.pages - 1 - page;
        }
    }

    int32_t components(host_component *components, size_t room) override {
        throwing_.at("components");
        if (room < accounts_.size()) {
            return HOST_INVALID_ARGUMENT;
        }
        for (const Account &account : accounts_) {
            *components++ = account.of;
        }
        return static_cast<int32_t>(accounts_.size());
    }

    int32_t take(uint32_t component, uint32_t *pages, size_t count) override {
        throwing_.at("take");
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t of = find(component);
        if (of == accounts_.size() || count % accounts_[of].parts != 0) {
            return HOST_INVALID_ARGUMENT;
        }
        if (count > unused_.size() || count > accounts_[of].left) {
            return HOST_WOULD_BLOCK;
        }
        for (size_t at = 0; at < count; at++) {
            pages[at] = unused_.back();
            unused_.pop_back();
            owners_[pages[at]] = static_cast<uint8_t>(of);
        }
        accounts_[of].left -= count;
        return 0;
    }

    int32_t give(uint32_t component, const uint32_t *pages, size_t count) override {
        throwing_.at("give");
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t of = find(component);
        if (of == accounts_.size()) {
            return HOST_INVALID_ARGUMENT;
        }
        // Marked one by one, which finds a page that is named twice; undone when one of them is not the component's.
        for (size_t at = 0; at < count; at++) {
            if (pages[at] >= owners_.size() || owners_[pages[at]] != of) {
                while (at > 0) {
                    owners_[pages[--at]] = static_cast<uint8_t>(of);
                }
                return HOST_INVALID_ARGUMENT;
            }
            owners_[pages[at]] = UNUSED;
        }
        // There is room for all pages since it was opened.
        unused_.insert(unused_.end(), pages, pages + count);
        accounts_[of].left += count;
        return 0;
    }

private:
    struct Account {
        host_component of;
        // Pool pages that a page of it is made of, and those that it may still take.
        uint32_t parts;
        uint64_t left;
    };

    // The place of this component, or how many there are.
    size_t find(uint32_t component) const {
        size_t at = 0;
        while (at < accounts_.size() && accounts_[at].of.id != component) {
            at++;
        }
        return at;
    }

    Throwing throwing_;
    std::mutex mutex_;
    std::vector<Account> accounts_;
    std::vector<uint32_t> unused_;
    // By page: the place of the component that has it, or UNUSED.
    std::vector<uint8_t> owners_;
};

} // namespace

const host_plugin host_plugin_c = host::Plugin().allocator<ListAllocator>();
