// A storage tier over LMDB: one database for all processes of a machine, a value for each page.
//
// LMDB brings what a tier has to keep: a reader sees all of a value or none of it, also after kill -9 and after a power cut, and
// processes that end leave no lock behind. host_tier.hpp brings the queue and the threads. So little is left to write here.
#include <lmdb.h>
#include <sys/stat.h>

#include <cerrno>
#include <shared_mutex>

#include "host_tier.hpp"

#ifndef MANIFEST
#define MANIFEST "plugin.toml"
#endif

HOST_PLUGIN_MANIFEST(MANIFEST)

namespace {

constexpr int64_t MIB = 1 << 20;
constexpr int64_t MAX_VALUE = 64 * MIB;

// Throws for what LMDB answered.
void check(int code, const std::string &what) {
    if (code != MDB_SUCCESS) {
        throw host::Error(code == MDB_MAP_FULL ? HOST_NO_RESOURCE : HOST_IO, what + ": " + mdb_strerror(code));
    }
}

struct Settings {
    std::string dir;
    int64_t size_limit_mib;
    int64_t threads;
    bool read_only;
};

// The settings; throws for those that open() would not take.
Settings settings(const host::Opening &opening) {
    const Settings read = {opening.string("dir"), opening.integer("size_limit_mib", 10240), opening.integer("threads", 4),
                           opening.boolean("read_only")};
    const auto refuse = [](const std::string &text) { throw host::Error(HOST_CONFIG, text); };
    if (read.dir.empty()) {
        refuse("dir is not set: name the folder of the database");
    }
    if (read.dir.front() != '/') {
        refuse("dir is " + read.dir + ", it must be an absolute path");
    }
    struct stat found;
    const bool is_there = stat(read.dir.c_str(), &found) == 0;
    if (is_there && !S_ISDIR(found.st_mode)) {
        refuse("dir is " + read.dir + ", which is no folder");
    }
    const std::string parent = read.dir.substr(0, read.dir.find_last_of('/', read.dir.find_last_not_of('/')) + 1);
    if (!is_there && (read.read_only || stat(parent.c_str(), &found) != 0)) {
        refuse("dir is " + read.dir + ", and " + (read.read_only ? read.dir : parent) + " does not exist: make it");
    }
    if (read.size_limit_mib < 16 || read.size_limit_mib > 16777216) {
        refuse("size_limit_mib is " + std::to_string(read.size_limit_mib) + ", it must be from 16 to 16777216");
    }
    if (read.threads < 2 || read.threads > 64) {
        refuse("threads is " + std::to_string(read.threads) + ", it must be from 2 to 64");
    }
    return read;
}

// An open database. LMDB allows one for a file in a process, so that instances with the same folder share it.
class Database {
public:
    explicit Database(const Settings &settings) : read_only(settings.read_only) {
        MDB_env *made = nullptr;
        check(mdb_env_create(&made), "LMDB cannot start");
        env.reset(made);
        check(mdb_env_set_mapsize(made, static_cast<size_t>(settings.size_limit_mib * MIB)), "size_limit_mib");
        // One for each read at a time, of all processes.
        check(mdb_env_set_maxreaders(made, 1024), "readers");
        // Transactions are not bound to threads. After a power cut the last values may be missing, and none is damaged.
        const unsigned flags = MDB_NOTLS | MDB_NOMETASYNC | (read_only ? MDB_RDONLY : 0);
        check(mdb_env_open(made, settings.dir.c_str(), flags, 0600), "dir " + settings.dir);
        // What processes that were killed had been reading can be written again.
        check(mdb_reader_check(made, nullptr), "dir " + settings.dir);
    }

    // That of this folder, opened if it is not yet open in this process.
    static std::shared_ptr<Database> of(const Settings &settings) {
        const std::lock_guard<std::mutex> lock(mutex());
        if (!settings.read_only && mkdir(settings.dir.c_str(), 0700) != 0 && errno != EEXIST) {
            throw host::Error(HOST_IO, "dir " + settings.dir + " cannot be made: " + strerror(errno));
        }
        struct stat found;
        if (stat(settings.dir.c_str(), &found) != 0) {
            throw host::Error(HOST_IO, "dir " + settings.dir + " cannot be used: " + strerror(errno));
        }
        // Never destroyed, because instances may be open when the process ends.
        static auto &all = *new std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Database>>;
        std::weak_ptr<Database> &known = all[{found.st_dev, found.st_ino}];
        std::shared_ptr<Database> database = known.lock();
        if (database == nullptr) {
            known = database = std::make_shared<Database>(settings);
        } else if (database->read_only && !settings.read_only) {
            throw host::Error(HOST_CONFIG, "dir " + settings.dir + " is open with read_only in this process");
        }
        return database;
    }

    // Gives a database back. One at a time with of(), which must not open what is being closed.
    static void release(std::shared_ptr<Database> &database) {
        const std::lock_guard<std::mutex> lock(mutex());
        database.reset();
    }

    const bool read_only;
    std::unique_ptr<MDB_env, void (*)(MDB_env *)> env{nullptr, mdb_env_close};
    // Shared by transactions; alone where the map changes.
    std::shared_mutex map;

private:
    static std::mutex &mutex() {
        static auto &mutex = *new std::mutex;
        return mutex;
    }
};

class Transaction {
public:
    Transaction(Database &database, unsigned flags) : lock_(database.map) {
        MDB_txn *begun = nullptr;
        int code = mdb_txn_begin(database.env.get(), nullptr, flags, &begun);
        while (code == MDB_MAP_RESIZED) {
            // Another process has a larger size_limit_mib, and has used it. Its map becomes ours.
            lock_.unlock();
            {
                const std::unique_lock<std::shared_mutex> alone(database.map);
                check(mdb_env_set_mapsize(database.env.get(), 0), "the database has grown");
            }
            lock_.lock();
            code = mdb_txn_begin(database.env.get(), nullptr, flags, &begun);
        }
        check(code, "a transaction cannot begin");
        txn_.reset(begun);
        // The unnamed database of the file, which is always there.
        check(mdb_dbi_open(begun, nullptr, 0, &dbi_), "the database cannot be opened");
    }

    // Whether the key is there, and its value, which stays until the transaction ends.
    bool find(const host_key &key, MDB_val *value) {
        MDB_val name = named(key);
        const int code = mdb_get(txn_.get(), dbi_, &name, value);
        check(code == MDB_NOTFOUND ? MDB_SUCCESS : code, "a value cannot be read");
        return code == MDB_SUCCESS;
    }
    void put(const host_key &key, MDB_val value) {
        MDB_val name = named(key);
        check(mdb_put(txn_.get(), dbi_, &name, &value, 0), "a value cannot be stored");
    }
    void remove(const host_key &key) {
        MDB_val name = named(key);
        check(mdb_del(txn_.get(), dbi_, &name, nullptr), "a value cannot be removed");
    }
    void commit() {
        // It ends the transaction, also where it fails.
        check(mdb_txn_commit(txn_.release()), "the change cannot be written");
    }
    // Bytes are those of all pages that are in use, which LMDB fills up.
    host_tier_usage usage() {
        MDB_stat stat;
        MDB_envinfo info;
        check(mdb_stat(txn_.get(), dbi_, &stat), "the database does not count");
        check(mdb_env_info(mdb_txn_env(txn_.get()), &info), "the database does not count");
        const uint64_t pages = stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages;
        // What removes a value writes pages, too: a sixteenth is for that.
        const uint64_t bytes = pages * stat.ms_psize, most = info.me_mapsize - info.me_mapsize / 16;
        return {stat.ms_entries, bytes, std::max(bytes, most), {0, 0, 0, 0, 0}};
    }
    // The keys behind one in their order, or from the first on.
    std::vector<host_key> keys(const host_key *behind, size_t most) {
        MDB_cursor *raw = nullptr;
        check(mdb_cursor_open(txn_.get(), dbi_, &raw), "keys cannot be listed");
        const std::unique_ptr<MDB_cursor, void (*)(MDB_cursor *)> cursor(raw, mdb_cursor_close);
        MDB_val name = behind == nullptr ? MDB_val() : named(*behind);
        std::vector<host_key> found;
        int code = mdb_cursor_get(raw, &name, nullptr, behind == nullptr ? MDB_FIRST : MDB_SET_RANGE);
        while (code == MDB_SUCCESS && found.size() < most) {
            if (name.mv_size == sizeof(host_key) && (behind == nullptr || memcmp(name.mv_data, behind, name.mv_size) != 0)) {
                memcpy(&found.emplace_back(), name.mv_data, name.mv_size);
            }
            code = mdb_cursor_get(raw, &name, nullptr, MDB_NEXT);
        }
        check(code == MDB_NOTFOUND ? MDB_SUCCESS : code, "keys cannot be listed");
        return found;
    }

private:
    static MDB_val named(const host_key &key) { return {sizeof key, const_cast<host_key *>(&key)}; }

    std::shared_lock<std::shared_mutex> lock_;
    std::unique_ptr<MDB_txn, void (*)(MDB_txn *)> txn_{nullptr, mdb_txn_abort};
    MDB_dbi dbi_ = 0;
};

class LmdbStore : public host::Store {
public:
    explicit LmdbStore(const host::Opening &opening) : settings_(settings(opening)), database_(Database::of(settings_)) {}
    ~LmdbStore() override { Database::release(database_); }

    host::QueueLimits limits() const override {
        host::QueueLimits limits;
        limits.max_value = static_cast<uint64_t>(std::min(MAX_VALUE, settings_.size_limit_mib * MIB / 8));
        limits.threads = static_cast<uint32_t>(settings_.threads);
        limits.writers = 1;
        return limits;
    }

    int32_t get(const host_key &key, uint8_t *to, uint32_t length, uint64_t *bytes) override {
        Transaction reading(*database_, MDB_RDONLY);
        MDB_val value;
        if (!reading.find(key, &value)) {
            return HOST_MISSING;
        }
        if (value.mv_size != length) {
            return HOST_INVALID_ARGUMENT;
        }
        memcpy(to, value.mv_data, length);
        *bytes = length;
        return HOST_FOUND;
    }

    int32_t put(const host_key &key, const uint8_t *from, uint32_t length) override {
        uint64_t bytes = 0;
        // A value never changes, and reading waits for no other process.
        if (exists(key, &bytes) == HOST_FOUND) {
            return HOST_STORED;
        }
        writable();
        Transaction writing(*database_, 0);
        const host_tier_usage usage = writing.usage();
        if (usage.bytes + length > usage.capacity) {
            return HOST_NO_RESOURCE;
        }
        writing.put(key, {length, const_cast<uint8_t *>(from)});
        writing.commit();
        return HOST_STORED;
    }

    int32_t exists(const host_key &key, uint64_t *bytes) override {
        Transaction reading(*database_, MDB_RDONLY);
        MDB_val value;
        const bool is_there = reading.find(key, &value);
        *bytes = is_there ? value.mv_size : 0;
        return is_there ? HOST_FOUND : HOST_MISSING;
    }

    int32_t remove(const host_key &key, uint64_t *bytes) override {
        writable();
        Transaction writing(*database_, 0);
        MDB_val value;
        if (!writing.find(key, &value)) {
            return HOST_MISSING;
        }
        *bytes = value.mv_size;
        writing.remove(key);
        writing.commit();
        return HOST_FOUND;
    }

    host_scanned scan(uint64_t cursor, host_key *keys, size_t room) override {
        const host_key behind = cursor == 0 ? host_key() : cursors_.key(cursor);
        const std::vector<host_key> found =
            Transaction(*database_, MDB_RDONLY).keys(cursor == 0 ? nullptr : &behind, room);
        std::copy(found.begin(), found.end(), keys);
        const uint64_t next = found.size() < room ? 0 : room == 0 ? cursor : cursors_.behind(found.back());
        return {static_cast<uint32_t>(found.size()), 0, next};
    }

    host_tier_usage usage() override { return Transaction(*database_, MDB_RDONLY).usage(); }

private:
    void writable() const {
        if (settings_.read_only) {
            throw host::Error(HOST_UNSUPPORTED, "the store was opened with read_only");
        }
    }

    const Settings settings_;
    std::shared_ptr<Database> database_;
    host::Cursors cursors_;
};

void check_config(std::string_view, const host::Opening &opening) { settings(opening); }

} // namespace

const host_plugin host_plugin_c = host::Plugin().tier<host::QueuedTier<LmdbStore>>().check<check_config>();
