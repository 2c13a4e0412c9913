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

    std::string path;
    int         fd    = -1;
    uint64_t    bytes = 0;     // size when it was opened
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

// Guards mappings of `path` that somebody else made in this process (libllama's mapping of the dense weights).
struct foreign_mappings {
    foreign_mappings() = default;
    foreign_mappings(const foreign_mappings &) = delete;
    foreign_mappings & operator=(const foreign_mappings &) = delete;
    ~foreign_mappings();

    void add(const std::string & path);
    bool lost() const;

private:
    static constexpr int MAX = 64;
    int guards[MAX];
    int n = 0;
};

int64_t process_id();

void watch_interrupts(bool on);
bool interrupted();

} // namespace edgemoe
