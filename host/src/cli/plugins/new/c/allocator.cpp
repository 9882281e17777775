// A pool allocator with one free list for each component.
//
// To make it yours: take() decides which pages are handed out next. All calls are hot: what you keep is allocated in the constructor.
#include <mutex>
#include <string>
#include <vector>

#include "host_plugin.hpp"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr uint32_t MAX_COMPONENTS = 16;

class ListAllocator final : public host::Allocator {
public:
    explicit ListAllocator(const host_pool_opening &opening) {
        if (opening.page_tokens == 0) {
            throw host::Error(HOST_INVALID_ARGUMENT, "a page must hold at least one token");
        }
        if (opening.components_count == 0 || opening.components_count > MAX_COMPONENTS) {
            throw host::Error(
                HOST_INVALID_ARGUMENT,
                std::to_string(opening.components_count) + " components, 1 to " + std::to_string(MAX_COMPONENTS) + " are allowed");
        }
        for (uint32_t at = 0; at < opening.components_count; at++) {
            const host_component_pool &of = opening.components[at];
            if (of.parts != 0) {
                throw host::Error(HOST_UNSUPPORTED, "components do not share here: the manifest does not say shared_pool");
            }
            if (find(of.component) != nullptr) {
                throw host::Error(HOST_INVALID_ARGUMENT, "component " + std::to_string(of.component) + " is there twice");
            }
            pools_.emplace_back(of);
        }
    }

    int32_t budgets(host_budget *budgets, size_t room) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (room < pools_.size()) {
            return HOST_INVALID_ARGUMENT;
        }
        for (const Pool &pool : pools_) {
            *budgets++ = {pool.of.component, pool.of.pages, static_cast<uint32_t>(pool.unused.size()), 0};
        }
        return static_cast<int32_t>(pools_.size());
    }

    int32_t take(uint32_t component, uint32_t *pages, size_t count) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        Pool *pool = find(component);
        if (pool == nullptr) {
            return HOST_INVALID_ARGUMENT;
        }
        if (pool->unused.size() < count) {
            return HOST_WOULD_BLOCK;
        }
        for (size_t at = 0; at < count; at++) {
            pages[at] = pool->unused.back();
            pool->unused.pop_back();
            pool->is_taken[pages[at]] = 1;
        }
        return 0;
    }

    int32_t give(uint32_t component, const uint32_t *pages, size_t count) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        Pool *pool = find(component);
        if (pool == nullptr) {
            return HOST_INVALID_ARGUMENT;
        }
        // Marked one by one, which finds a page that is named twice; undone when one of them was not taken.
        for (size_t at = 0; at < count; at++) {
            if (pages[at] >= pool->of.pages || pool->is_taken[pages[at]] == 0) {
                while (at > 0) {
                    pool->is_taken[pages[--at]] = 1;
                }
                return HOST_INVALID_ARGUMENT;
            }
            pool->is_taken[pages[at]] = 0;
        }
        // There is room for all pages since it was opened.
        pool->unused.insert(pool->unused.end(), pages, pages + count);
        return 0;
    }

private:
    struct Pool {
        explicit Pool(const host_component_pool &opened) : of(opened), unused(opened.pages), is_taken(opened.pages) {
            // Low pages are handed out first.
            for (uint32_t page = 0; page < opened.pages; page++) {
                unused[page] = opened.pages - 1 - page;
            }
        }
        host_component_pool of;
        std::vector<uint32_t> unused;
        std::vector<uint8_t> is_taken;
    };

    Pool *find(uint32_t component) {
        for (Pool &pool : pools_) {
            if (pool.of.component == component) {
                return &pool;
            }
        }
        return nullptr;
    }

    std::mutex mutex_;
    std::vector<Pool> pools_;
};

} // namespace

const host_plugin host_plugin_c = host::Plugin().allocator<ListAllocator>();
