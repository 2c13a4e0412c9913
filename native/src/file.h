// Everything that asks the operating system for something: files, mappings, and the two signals that concern them.
//
// Threads: `region` objects are made and destroyed by the thread that owns the model; the SIGBUS handler runs on whichever thread touched a lost
// page and meets them only in a table of atomics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace edgemoe {

size_t page_size();
inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// What a file is, beside its name: another one that was put in its place, or written over, differs.
struct file_identity {
    uint64_t device = 0, inode = 0, bytes = 0;
    int64_t  changed_ns = 0;

    bool operator==(const file_identity & o) const { return device == o.device && inode == o.inode && bytes == o.bytes && changed_ns == o.changed_ns; }
};

// A read-only file. Errors are exceptions that name the path.
struct file {
    explicit file(const std::string & path);
    // Takes over a descriptor (a memory file); `path` is used in messages only.
    file(int fd, const std::string & path);
    file(file && other) noexcept;
    file(const file &) = delete;
    file & operator=(const file &) = delete;
    ~file();

    // Reads exactly `bytes` from `offset`; a shorter file is an error that says so.
    void read(void * dst, size_t bytes, uint64_t offset) const;
    // These bytes are needed soon: asks for them in the page cache.
    void want(uint64_t offset, uint64_t bytes) const;
    file_identity identity() const;

    std::string path;
    int         fd    = -1;
    uint64_t    bytes = 0;     // size when it was opened
};

// A read-only file whose reads go past the page cache (O_DIRECT), or, where its file system has no such reads, through it.
struct direct_file {
    explicit direct_file(const std::string & path);
    direct_file(direct_file && other) noexcept;
    direct_file(const direct_file &) = delete;
    direct_file & operator=(const direct_file &) = delete;
    ~direct_file();

    file_identity identity() const;
    // Reads exactly `bytes` from `offset`; a shorter file is an error that says so. `dst` is to lie in its page where `offset` lies in one of the file, and what else
    // there is in the first and the last page is overwritten. `most` bytes per call of the system; 0: no limit.
    void read(char * dst, size_t bytes, uint64_t offset, size_t most = 0);

    std::string path;
    bool        direct = false;

private:
    void reopen(int flags);

    int fd = -1;
};

// A memory file: `content` followed by a hole up to `bytes`.
struct ghost_file {
    ghost_file(const std::string & content, uint64_t bytes);

    // Cuts the hole off. libllama maps the file with MAP_POPULATE, which would fill a hole with as many zero pages as the experts are big; beyond
    // the end of a file there is nothing to populate. Its bounds checks have been made by then, and nobody reads the data.
    void drop_hole();

    std::string path() const;  // can be opened while this object lives

private:
    file     memory;
    uint64_t content_bytes;
};

// An address range in which files are mapped read-only. A page that loses its file while mapped (somebody truncates it) reads as zeros from
// then on and lost() says so, where the kernel would end the process with SIGBUS.
struct region {
    explicit region(size_t bytes);
    region(const region &) = delete;
    region & operator=(const region &) = delete;
    ~region();

    // Maps file bytes [0, length) at `offset`, which is a multiple of the page size.
    void map(size_t offset, const file & f, size_t length);

    char * base() const { return begin; }
    bool   lost() const;

private:
    void * reserved;
    size_t reserved_bytes;
    char * begin;
    int    guard;
};

// Memory of the process's own in a reserved range of addresses, where pages come with the first write and can be moved without a copy. Offsets and sizes are multiples
// of the page size.
struct arena {
    explicit arena(size_t bytes);
    arena(const arena &) = delete;
    arena & operator=(const arena &) = delete;
    ~arena();

    // [from, from + bytes) has no pages any more; where the system can do it, [to, to + bytes) has them now, instead of its own.
    void move(size_t from, size_t to, size_t bytes);
    void drop(size_t at, size_t bytes);

    char * base() const { return begin; }

private:
    char * begin;
    size_t bytes;
};

// Guards mappings of `path` that somebody else made in this process (libllama's mapping of the dense weights).
struct foreign_mappings {
    foreign_mappings() = default;
    foreign_mappings(const foreign_mappings &) = delete;
    foreign_mappings & operator=(const foreign_mappings &) = delete;
    ~foreign_mappings();

    void add(const std::string & path);
    bool lost() const;
    // Takes these bytes of the file out of its mappings, and out of the page cache if nobody else has them mapped. They can still be read there, from the disk.
    void forget(const file & f, uint64_t offset, uint64_t bytes) const;
    // What is read from the mappings comes page by page: no neighbours are read with it, which may be what was to be forgotten.
    void expect_no_neighbours() const;

private:
    static constexpr int MAX = 64;
    struct mapping { int guard; char * begin; uint64_t offset, bytes, inode; };
    mapping mappings[MAX];
    int n = 0;
};

int64_t process_id();

void watch_interrupts(bool on);
bool interrupted();

} // namespace edgemoe
