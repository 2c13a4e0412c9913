#include "file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace edgemoe {

size_t page_size() {
    static const size_t size = (size_t) sysconf(_SC_PAGESIZE);
    return size;
}

[[noreturn]] static void fail(const std::string & path, const char * what) {
    throw std::runtime_error(path + ": " + what + ": " + strerror(errno));
}

static file_identity identity_of(int fd, const std::string & path) {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        fail(path, "cannot be read");
    }
#ifdef __APPLE__
    const struct timespec changed = st.st_mtimespec;
#else
    const struct timespec changed = st.st_mtim;
#endif
    return { (uint64_t) st.st_dev, (uint64_t) st.st_ino, (uint64_t) st.st_size, (int64_t) changed.tv_sec * 1000000000 + changed.tv_nsec };
}

file::file(const std::string & path) : path(path) {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail(path, "cannot be opened");
    }
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        throw std::runtime_error(path + ": not a regular file");
    }
    bytes = (uint64_t) st.st_size;
}

file::file(int fd, const std::string & path) : path(path), fd(fd) {}

file::file(file && other) noexcept : path(std::move(other.path)), fd(other.fd), bytes(other.bytes) {
    other.fd = -1;
}

file::~file() {
    if (fd >= 0) {
        close(fd);
    }
}

void file::read(void * dst, size_t n, uint64_t offset) const {
    size_t done = 0;
    while (done < n) {
        const ssize_t got = pread(fd, (char *) dst + done, n - done, (off_t) (offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail(path, "cannot be read");
        }
        if (got == 0) {
            throw std::runtime_error(path + ": file ends at " + std::to_string(offset + done) + ", wanted " + std::to_string(offset + n) + " bytes");
        }
        done += (size_t) got;
    }
}

void file::want(uint64_t offset, uint64_t n) const {
#if defined(POSIX_FADV_WILLNEED)
    posix_fadvise(fd, (off_t) offset, (off_t) n, POSIX_FADV_WILLNEED);
#else
    (void) offset, (void) n;
#endif
}

file_identity file::identity() const { return identity_of(fd, path); }

// --- direct reads ---

direct_file::direct_file(const std::string & path) : path(path) {
#ifdef O_DIRECT
    direct = true;
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
        reopen(0);
    }
#else
    reopen(0);
#endif
    if (fd < 0) {
        fail(path, "cannot be opened");
    }
}

void direct_file::reopen(int flags) {
    if (fd >= 0) {
        close(fd);
    }
    direct = false;
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
#ifdef F_NOCACHE
    direct = fd >= 0 && fcntl(fd, F_NOCACHE, 1) == 0;
#endif
}

direct_file::direct_file(direct_file && other) noexcept : path(std::move(other.path)), direct(other.direct), fd(other.fd) {
    other.fd = -1;
}

direct_file::~direct_file() {
    if (fd >= 0) {
        close(fd);
    }
}

file_identity direct_file::identity() const { return identity_of(fd, path); }

void direct_file::read(char * dst, size_t bytes, uint64_t offset, size_t most) {
    const size_t page = page_size(), before = (size_t) (offset % page);
    char * const   to   = dst - before;
    const uint64_t from = offset - before;
    const size_t   wanted = before + bytes;   // the end of it; whole pages are read
    size_t done = 0;
    while (done < wanted) {
        size_t n = round_up(wanted, page) - done;
        if (most) {
            n = std::min(n, std::max(most / page, (size_t) 1) * page);
        }
        const ssize_t got = pread(fd, to + done, n, (off_t) (from + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0 && errno == EINVAL && direct && done == 0) {
            reopen(0);   // some file systems take the flag and refuse the reads
            if (fd >= 0) {
                continue;
            }
        }
        if (got < 0) {
            fail(path, "cannot be read");
        }
        const size_t end = done + (size_t) got;
        if (got == 0 || (end < wanted && end / page * page == done)) {
            throw std::runtime_error(path + ": file ends at " + std::to_string(from + end) + ", wanted " + std::to_string(offset + bytes) + " bytes");
        }
        done = end < wanted ? end / page * page : end;   // a part of a page is read again
    }
#if defined(POSIX_FADV_DONTNEED)
    if (!direct) {
        posix_fadvise(fd, (off_t) from, (off_t) round_up(wanted, page), POSIX_FADV_DONTNEED);   // its bytes are held twice otherwise
    }
#endif
}

static int memory_descriptor() {
#ifdef __linux__
    const int fd = memfd_create("edgemoe-ghost", MFD_CLOEXEC);
#else
    char name[] = "/tmp/edgemoe-ghost-XXXXXX";
    const int fd = mkstemp(name);
    if (fd >= 0) {
        unlink(name);
    }
#endif
    if (fd < 0) {
        fail("memory file", "cannot be made");
    }
    return fd;
}

ghost_file::ghost_file(const std::string & content, uint64_t bytes) : memory(memory_descriptor(), "memory file"), content_bytes(content.size()) {
    if (pwrite(memory.fd, content.data(), content.size(), 0) != (ssize_t) content.size() || ftruncate(memory.fd, (off_t) bytes) != 0) {
        fail(memory.path, "cannot be written");
    }
}

void ghost_file::drop_hole() {
    if (ftruncate(memory.fd, (off_t) content_bytes) != 0) {
        fail(memory.path, "cannot be cut");
    }
}

std::string ghost_file::path() const {
#ifdef __linux__
    return "/proc/self/fd/" + std::to_string(memory.fd);
#else
    return "/dev/fd/" + std::to_string(memory.fd);
#endif
}

// --- guarded mappings ---
// The table is global because a signal handler has nothing else to reach it by. A slot is free while `end` is 0; `begin` is written before `end`.

namespace {

struct guard_slot {
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};
    std::atomic<bool>      lost{false};
};

constexpr int N_GUARDS = 1024;
guard_slot       guards[N_GUARDS];
std::mutex       guards_mutex;
struct sigaction previous_sigbus;

void on_sigbus(int signal, siginfo_t * info, void * context) {
    const uintptr_t address = (uintptr_t) info->si_addr;
    bool guarded = false;
    for (guard_slot & g : guards) {
        if (address >= g.begin.load() && address < g.end.load()) {
            g.lost.store(true);
            guarded = true;
        }
    }
    void * page = (void *) (address / page_size() * page_size());
    // mmap is a plain system call here: safe in a handler. The faulting instruction then runs again and reads zeros.
    if (guarded && mmap(page, page_size(), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
        return;
    }
    // Not ours: hand it to whoever was there before.
    if (previous_sigbus.sa_flags & SA_SIGINFO) {
        previous_sigbus.sa_sigaction(signal, info, context);
    } else if (previous_sigbus.sa_handler != SIG_DFL && previous_sigbus.sa_handler != SIG_IGN) {
        previous_sigbus.sa_handler(signal);
    } else {
        sigaction(SIGBUS, &previous_sigbus, nullptr);
    }
}

int add_guard(const void * begin, size_t bytes) {
    std::lock_guard<std::mutex> lock(guards_mutex);
    // Asked each time: another library may have put its own handler over ours meanwhile.
    struct sigaction current;
    sigaction(SIGBUS, nullptr, &current);
    if (!(current.sa_flags & SA_SIGINFO) || current.sa_sigaction != on_sigbus) {
        page_size();   // its first call must not happen inside the handler
        previous_sigbus = current;
        struct sigaction ours = {};
        ours.sa_sigaction = on_sigbus;
        ours.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, nullptr);
    }
    for (int i = 0; i < N_GUARDS; i++) {
        if (guards[i].end.load() == 0) {
            guards[i].lost.store(false);
            guards[i].begin.store((uintptr_t) begin);
            guards[i].end.store((uintptr_t) begin + bytes);
            return i;
        }
    }
    throw std::runtime_error("too many models open in one process: " + std::to_string(N_GUARDS) + " mappings are guarded");
}

void remove_guard(int i) {
    guards[i].end.store(0);
}

} // namespace

static constexpr size_t LARGE_PAGE = 2u << 20;

region::region(size_t n) : reserved_bytes(round_up(n, page_size()) + LARGE_PAGE) {
    // Address space only. What no file is mapped over stays without access, so a wrong offset is noticed at once.
    reserved = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
        fail(std::to_string(reserved_bytes) + " bytes of address space", "cannot be reserved");
    }
    // Where the page cache holds a file in large pages, the kernel can map them as such, but only at an address that is aligned like them.
    begin = (char *) round_up((uintptr_t) reserved, LARGE_PAGE);
    const size_t bytes = round_up(n, page_size());
    guard = add_guard(begin, bytes);
}

region::~region() {
    remove_guard(guard);
    munmap(reserved, reserved_bytes);
}

void region::map(size_t offset, const file & f, size_t length) {
    if (mmap(begin + offset, length, PROT_READ, MAP_SHARED | MAP_FIXED, f.fd, 0) == MAP_FAILED) {
        if (errno == ENOMEM) {
            throw std::runtime_error(f.path + ": cannot be mapped: the process has too many mappings (raise it: sysctl vm.max_map_count=262144)");
        }
        fail(f.path, "cannot be mapped");
    }
}

// --- memory ---

arena::arena(size_t n) : bytes(round_up(n, page_size())) {
    void * at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        fail(std::to_string(bytes) + " bytes of address space", "cannot be reserved");
    }
    begin = (char *) at;
#ifdef MADV_NOHUGEPAGE
    madvise(begin, bytes, MADV_NOHUGEPAGE);   // a large page would reach into the place of a neighbour, and could not be moved
#endif
}

arena::~arena() {
    munmap(begin, bytes);
}

void arena::move(size_t from, size_t to, size_t n) {
#ifdef MREMAP_DONTUNMAP
    // The range itself stays reserved. Fails on kernels before 5.7, and when the process has too many mappings.
    if (mremap(begin + from, n, n, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, begin + to) != MAP_FAILED) {
        return;
    }
#endif
    (void) to;
    drop(from, n);
}

void arena::drop(size_t at, size_t n) {
#ifdef __APPLE__
    mmap(begin + at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
#else
    madvise(begin + at, n, MADV_DONTNEED);
#endif
}

bool region::lost() const {
    return guards[guard].lost.load();
}

foreign_mappings::~foreign_mappings() {
    for (int i = 0; i < n; i++) {
        remove_guard(mappings[i].guard);
    }
}

void foreign_mappings::forget(const file & f, uint64_t offset, uint64_t bytes) const {
#if defined(POSIX_FADV_DONTNEED)
    struct stat st;
    if (fstat(f.fd, &st) != 0) {
        return;
    }
    const uint64_t page = page_size(), first = round_up(offset, page), end = (offset + bytes) / page * page;
    for (int i = 0; i < n; i++) {
        const mapping & m = mappings[i];
        const uint64_t a = std::max(first, m.offset), b = std::min(end, m.offset + m.bytes);
        if (m.inode == (uint64_t) st.st_ino && a < b) {
            madvise(m.begin + (a - m.offset), b - a, MADV_DONTNEED);
        }
    }
    posix_fadvise(f.fd, (off_t) offset, (off_t) bytes, POSIX_FADV_DONTNEED);
#else
    (void) f, (void) offset, (void) bytes;
#endif
}

void foreign_mappings::add(const std::string & path) {
#ifdef __linux__
    struct stat st;
    FILE * maps = fopen("/proc/self/maps", "r");
    if (!maps || stat(path.c_str(), &st) != 0) {
        if (maps) {
            fclose(maps);
        }
        return;   // without /proc the dense weights are unguarded, as in llama.cpp itself
    }
    // A package has thousands of mappings: a look for the name first, the parsing only where it is found.
    const std::string name = path.substr(path.find_last_of('/') + 1);
    char line[8192];
    while (fgets(line, sizeof(line), maps) && n < MAX) {
        unsigned long begin, end, inode;
        unsigned long offset;
        if (strstr(line, name.c_str()) && sscanf(line, "%lx-%lx %*s %lx %*s %lu", &begin, &end, &offset, &inode) == 4 && inode == (unsigned long) st.st_ino) {
            mappings[n++] = { add_guard((void *) begin, end - begin), (char *) begin, offset, end - begin, inode };
        }
    }
    fclose(maps);
#else
    (void) path;
#endif
}

void foreign_mappings::expect_no_neighbours() const {
    for (int i = 0; i < n; i++) {
        madvise(mappings[i].begin, mappings[i].bytes, MADV_RANDOM);
    }
}

bool foreign_mappings::lost() const {
    for (int i = 0; i < n; i++) {
        if (guards[mappings[i].guard].lost.load()) {
            return true;
        }
    }
    return false;
}

int64_t process_id() {
    return (int64_t) getpid();
}

// --- Ctrl-C ---

static std::atomic<bool> interrupt_seen{false};
static struct sigaction  previous_sigint;

static void on_sigint(int) { interrupt_seen.store(true); }

void watch_interrupts(bool on) {
    struct sigaction current;
    sigaction(SIGINT, nullptr, &current);
    const bool ours = current.sa_handler == on_sigint;
    interrupt_seen.store(false);
    if (on && !ours) {
        previous_sigint = current;
        struct sigaction watching = {};
        watching.sa_handler = on_sigint;
        watching.sa_flags   = SA_RESTART;
        sigemptyset(&watching.sa_mask);
        sigaction(SIGINT, &watching, nullptr);
    } else if (!on && ours) {
        sigaction(SIGINT, &previous_sigint, nullptr);
    }
}

bool interrupted() {
    return interrupt_seen.load(std::memory_order_relaxed);
}

} // namespace edgemoe
