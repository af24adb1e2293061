/* The way in where libfuse was built without custom I/O, as it is by default from 3.18.3 on.
 *
 * A shared library calls read and writev by way of a table of addresses of its own, which the dynamic
 * linker filled in when it was loaded (ELF: the relocations DT_JMPREL and DT_RELA, of the types
 * R_*_JUMP_SLOT and R_*_GLOB_DAT). In libfuse's table the two are replaced by functions of this file,
 * for libfuse alone. Each looks at the descriptor: the session's is the tap's, all others are none of
 * its business. The table is read-only where the library asked for that (PT_GNU_RELRO), and is again
 * once this is done.
 */
#include "_tap.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define SLOT R_X86_64_JUMP_SLOT
#define DATA R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define SLOT R_AARCH64_JUMP_SLOT
#define DATA R_AARCH64_GLOB_DAT
#endif

static ssize_t hooked_read(int fd, void *buffer, size_t size)
{
    return fd == tap.poll ? tap_read(fd, buffer, size, NULL) : read(fd, buffer, size);
}

static ssize_t hooked_writev(int fd, const struct iovec *iov, int count)
{
    return fd == tap.poll ? tap_writev(fd, (struct iovec *)(uintptr_t)iov, count, NULL)
                          : writev(fd, iov, count);
}

#ifdef SLOT

struct library {
    uintptr_t base;
    const ElfW(Sym) *symbols;
    const char *names;
    const ElfW(Rela) *calls, *others;
    size_t call_count, other_count;
};

/* glibc has made addresses of what the file has as offsets; others may not have. */
static const void *at(uintptr_t base, ElfW(Addr) value)
{
    return (const void *)(value < base ? base + value : value);
}

static void look(const struct link_map *map, struct library *found)
{
    memset(found, 0, sizeof *found);
    found->base = (uintptr_t)map->l_addr;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++)
        switch (entry->d_tag) {
        case DT_SYMTAB: found->symbols = at(found->base, entry->d_un.d_ptr); break;
        case DT_STRTAB: found->names = at(found->base, entry->d_un.d_ptr); break;
        case DT_JMPREL: found->calls = at(found->base, entry->d_un.d_ptr); break;
        case DT_PLTRELSZ: found->call_count = entry->d_un.d_val / sizeof *found->calls; break;
        case DT_RELA: found->others = at(found->base, entry->d_un.d_ptr); break;
        case DT_RELASZ: found->other_count = entry->d_un.d_val / sizeof *found->others; break;
        default: break;
        }
}

static bool is_read_only(const void *place)
{
    char line[256];
    bool read_only = false;
    FILE *maps = fopen("/proc/self/maps", "re");

    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char mode[5];

        if (sscanf(line, "%lx-%lx %4s", &start, &end, mode) == 3 && (uintptr_t)place >= start
            && (uintptr_t)place < end)
            read_only = mode[1] != 'w';
    }
    if (maps)
        fclose(maps);
    return read_only;
}

static bool replace(void **place, void *function)
{
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = (uintptr_t)place & ~(size - 1);
    bool locked = is_read_only(place);

    if (locked && mprotect((void *)page, size, PROT_READ | PROT_WRITE))
        return false;
    __atomic_store_n(place, function, __ATOMIC_RELEASE);
    return !locked || !mprotect((void *)page, size, PROT_READ);
}

static bool redirect(const struct library *library, const ElfW(Rela) *entries, size_t count,
                     const char *name, void *function)
{
    bool done = false;

    for (size_t i = 0; i < count; i++) {
        const ElfW(Sym) *symbol = &library->symbols[ELF64_R_SYM(entries[i].r_info)];
        uint32_t type = (uint32_t)ELF64_R_TYPE(entries[i].r_info);

        if ((type == SLOT || type == DATA) && !strcmp(library->names + symbol->st_name, name)) {
            if (!replace((void **)(library->base + entries[i].r_offset), function))
                return false;
            done = true;
        }
    }
    return done;
}

static bool hook(const struct library *library, const char *name, void *function)
{
    bool called = redirect(library, library->calls, library->call_count, name, function);
    bool other = redirect(library, library->others, library->other_count, name, function);

    return called || other;
}

/* 0, or -1: this library's calls cannot be redirected. */
int tap_hook(const void *function_of_library)
{
    Dl_info info;
    void *handle = dladdr(function_of_library, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                                      : NULL;
    struct link_map *map = NULL;
    struct library library;
    bool done;

    if (!handle)
        return -1;
    done = !dlinfo(handle, RTLD_DI_LINKMAP, &map);
    if (done) {
        look(map, &library);
        done = library.symbols && library.names
            && hook(&library, "read", (void *)(uintptr_t)hooked_read)
            && hook(&library, "writev", (void *)(uintptr_t)hooked_writev);
    }
    dlclose(handle);
    return done ? 0 : -1;
}

#else

int tap_hook(const void *function_of_library)
{
    (void)function_of_library, (void)hooked_read, (void)hooked_writev;
    return -1; /* other processors have other tables */
}

#endif
