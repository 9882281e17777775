//! Counts the allocations that a loaded plugin's own code makes.
//!
//! In this process only, the plugin's references to the C library's allocator are replaced by references to counting functions.
//! That counts the calls of the file itself. It does not count those of libraries that the file loads, nor those of an allocator of
//! its own.

use std::cell::Cell;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use object::elf::FileHeader64;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Rela, Sym};
use object::{Endianness, ReadRef};
use rustix::mm::{MprotectFlags, mprotect};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far, by code of plugins that are [`watch`]ed.
pub fn count() -> u64 {
    COUNT.with(Cell::get)
}

fn counted() {
    COUNT.with(|count| count.set(count.get() + 1));
}

unsafe extern "C" {
    fn malloc(size: usize) -> *mut c_void;
    fn calloc(count: usize, size: usize) -> *mut c_void;
    fn realloc(old: *mut c_void, size: usize) -> *mut c_void;
    fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void;
    fn posix_memalign(result: *mut *mut c_void, alignment: usize, size: usize) -> i32;
}

unsafe extern "C" fn counting_malloc(size: usize) -> *mut c_void {
    counted();
    // SAFETY: the caller's promise, passed on.
    unsafe { malloc(size) }
}

unsafe extern "C" fn counting_calloc(number: usize, size: usize) -> *mut c_void {
    counted();
    // SAFETY: the caller's promise, passed on.
    unsafe { calloc(number, size) }
}

unsafe extern "C" fn counting_realloc(old: *mut c_void, size: usize) -> *mut c_void {
    counted();
    // SAFETY: the caller's promise, passed on.
    unsafe { realloc(old, size) }
}

unsafe extern "C" fn counting_aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    counted();
    // SAFETY: the caller's promise, passed on.
    unsafe { aligned_alloc(alignment, size) }
}

unsafe extern "C" fn counting_posix_memalign(result: *mut *mut c_void, alignment: usize, size: usize) -> i32 {
    counted();
    // SAFETY: the caller's promise, passed on.
    unsafe { posix_memalign(result, alignment, size) }
}

/// Functions of C++ that allocate: for each its name, a counting function, and the address of the original function.
macro_rules! operators {
    ($($operator:ident $symbol:literal ($($argument:ident: $type:ty),*))*) => {
        mod operators {
            use std::ffi::c_void;
            use std::sync::atomic::{AtomicUsize, Ordering};

            $(pub(super) mod $operator {
                use super::*;

                pub(in super::super) static BEFORE: AtomicUsize = AtomicUsize::new(0);

                /// Counts and calls the original function. The exception for lack of memory unwinds through it.
                pub(in super::super) unsafe extern "C-unwind" fn counting($($argument: $type),*) -> *mut c_void {
                    super::super::counted();
                    let before = BEFORE.load(Ordering::Relaxed);
                    // SAFETY: the plugin's own slot of this name held this address.
                    let before: unsafe extern "C-unwind" fn($($type),*) -> *mut c_void = unsafe { std::mem::transmute(before) };
                    // SAFETY: the caller's promise, passed on.
                    unsafe { before($($argument),*) }
                }
            })*
        }

        fn operator(name: &[u8]) -> Option<(usize, &'static AtomicUsize)> {
            match name {
                $($symbol => Some((operators::$operator::counting as *const () as usize, &operators::$operator::BEFORE)),)*
                _ => None,
            }
        }
    };
}

operators! {
    new b"_Znwm" (size: usize)
    new_array b"_Znam" (size: usize)
    new_nothrow b"_ZnwmRKSt9nothrow_t" (size: usize, nothrow: usize)
    new_array_nothrow b"_ZnamRKSt9nothrow_t" (size: usize, nothrow: usize)
    new_aligned b"_ZnwmSt11align_val_t" (size: usize, alignment: usize)
    new_array_aligned b"_ZnamSt11align_val_t" (size: usize, alignment: usize)
    new_aligned_nothrow b"_ZnwmSt11align_val_tRKSt9nothrow_t" (size: usize, alignment: usize, nothrow: usize)
    new_array_aligned_nothrow b"_ZnamSt11align_val_tRKSt9nothrow_t" (size: usize, alignment: usize, nothrow: usize)
}

/// A counting function, and where to store the address of the original function that it calls.
type Replacement = (usize, Option<&'static AtomicUsize>);

/// The replacement for the function of this name, with the place for the original's address if it is called.
fn replacement(name: &[u8]) -> Option<Replacement> {
    let function = match name {
        b"malloc" => Some(counting_malloc as *const () as usize),
        b"calloc" => Some(counting_calloc as *const () as usize),
        b"realloc" => Some(counting_realloc as *const () as usize),
        b"aligned_alloc" => Some(counting_aligned_alloc as *const () as usize),
        b"posix_memalign" => Some(counting_posix_memalign as *const () as usize),
        _ => None,
    };
    let operator = || operator(name).map(|(function, before)| (function, Some(before)));
    function.map(|function| (function, None)).or_else(operator)
}

/// Starts counting for a file that is loaded.
///
/// # Errors
/// A sentence, when the file's references cannot be found.
pub fn watch(file: &Path) -> Result<(), String> {
    let data = std::fs::read(file).map_err(|e| e.to_string())?;
    let base = base(file).ok_or("the file is not mapped")?;
    let slots = slots(&data).map_err(|e| e.to_string())?;
    if slots.is_empty() {
        return Err("it does not call the system's allocator".to_owned());
    }
    let page = rustix::param::page_size();
    for (at, (function, before)) in slots {
        let slot = (base + at as usize) as *mut usize;
        let start = (slot as usize & !(page - 1)) as *mut c_void;
        // SAFETY: the slot lies in the library's own relocated data, which stays mapped. Its page becomes writable. A slot has
        // eight aligned bytes, so it lies in one page.
        unsafe { mprotect(start, page, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|e| format!("its table of functions cannot be changed: {e}"))?;
        // SAFETY: the slot holds the address of a function with this signature, and no other thread is in the plugin.
        let held = unsafe { slot.read_volatile() };
        if held == 0 {
            // The slot of a weak symbol that nothing defines.
            continue;
        }
        // A second call of `watch` finds the counting function in the slot.
        if let Some(before) = before.filter(|_before| held != function) {
            before.store(held, Ordering::Relaxed);
        }
        // SAFETY: as above.
        unsafe { slot.write_volatile(function) };
    }
    Ok(())
}

/// The address at which the system mapped the file.
fn base(file: &Path) -> Option<usize> {
    let file = std::fs::canonicalize(file).ok()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let (range, offset) = (fields.next()?, fields.nth(1)?);
        let path = fields.nth(2)?;
        let first = offset.bytes().all(|b| b == b'0') && Path::new(path) == file;
        usize::from_str_radix(range.split('-').next().filter(|_| first)?, 16).ok()
    })
}

/// Offsets from the base of the slots that hold an allocator's address, each with its replacement.
fn slots(data: &[u8]) -> object::Result<Vec<(u64, Replacement)>> {
    const STRTAB: i64 = 5;
    const SYMTAB: i64 = 6;
    const RELA: i64 = 7;
    const RELASZ: i64 = 8;
    const PLTRELSZ: i64 = 2;
    const JMPREL: i64 = 23;
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let segments = header.program_headers(endian, data)?;
    let in_file = |address: u64| {
        segments.iter().find_map(|s| {
            let inside = address.checked_sub(s.p_vaddr(endian)).filter(|at| *at < s.p_filesz(endian));
            Some(s.p_offset(endian) + inside.filter(|_| s.p_type(endian) == object::elf::PT_LOAD)?)
        })
    };
    let mut found = Vec::new();
    for segment in segments {
        let Some(entries) = segment.dynamic(endian, data)? else { continue };
        let value = |tag: i64| entries.iter().find(|e| e.tag(endian).0 == tag).map(|e| e.val(endian));
        let place = |tag| value(tag).and_then(in_file);
        let (Some(symbols), Some(strings)) = (place(SYMTAB), place(STRTAB)) else { continue };
        for (table, bytes) in [(RELA, RELASZ), (JMPREL, PLTRELSZ)] {
            let (Some(start), Some(bytes)) = (place(table), value(bytes)) else { continue };
            let count = bytes as usize / size_of::<object::elf::Rela64<Endianness>>();
            let relocations = data.read_slice_at::<object::elf::Rela64<Endianness>>(start, count);
            for relocation in relocations.unwrap_or_default() {
                let index = relocation.r_info.get(endian) >> 32;
                let at = symbols + index * size_of::<object::elf::Sym64<Endianness>>() as u64;
                let Ok(symbol) = data.read_at::<object::elf::Sym64<Endianness>>(at) else { continue };
                let name = strings + u64::from(symbol.st_name(endian));
                let name = data.read_bytes_at_until(name..name + 64, 0).unwrap_or_default();
                if let Some(function) = replacement(name).filter(|_| index != 0) {
                    found.push((relocation.r_offset(endian), function));
                }
            }
        }
    }
    Ok(found)
}
