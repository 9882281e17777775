//! Variables are added while other threads read them. The tests take turns: only one may change the environment.

use std::ffi::{CStr, OsStr, c_char};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_transfer_kit::environment;

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
    fn getenv(name: *const c_char) -> *const c_char;
}

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a variable as a library in C does.
fn read(name: &CStr) -> Option<String> {
    // SAFETY: what is found is a terminated string that is never freed.
    unsafe {
        let found = getenv(name.as_ptr());
        (!found.is_null()).then(|| CStr::from_ptr(found).to_string_lossy().into_owned())
    }
}

fn add<'a>(variables: &[(&'a str, &str)]) -> Vec<&'a str> {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, OsStr::new(*value))).collect();
    // SAFETY: nothing of this program changes the environment but tests, one at a time.
    unsafe { environment::add(&variables) }
}

fn array() -> *mut *mut c_char {
    // SAFETY: it is aligned and always there.
    unsafe { AtomicPtr::from_ptr(&raw mut environ) }.load(Ordering::Acquire)
}

/// The array's pointers with the null pointer at its end.
fn entries(array: *const *mut c_char) -> Vec<usize> {
    // SAFETY: it ends with a null pointer, and was never freed.
    let length = (0..).take_while(|at| unsafe { !(*array.add(*at)).is_null() }).count() + 1;
    // SAFETY: as above.
    (0..length).map(|at| unsafe { *array.add(at) } as usize).collect()
}

#[test]
fn what_is_set_stays_and_what_cannot_be_a_variable_is_left_out() {
    let _turn = turn();
    assert_eq!(add(&[("KIT_A", "1"), ("KIT_B", "two words")]), ["KIT_A", "KIT_B"]);
    assert_eq!(add(&[("KIT_A", "3"), ("KIT_AB", ""), ("KIT_AB", "4")]), ["KIT_AB"]);
    assert_eq!(add(&[("", "1"), ("KIT=C", "1"), ("KIT_D", "a\0b"), ("KIT\0E", "1")]), [""; 0]);
    let values = [c"KIT_A", c"KIT_B", c"KIT_AB", c"KIT", c"KIT_D"].map(read);
    let expected = [Some("1"), Some("two words"), Some(""), None, None];
    assert_eq!(values, expected.map(|value| value.map(str::to_owned)));
    assert_eq!(std::env::var("KIT_B").unwrap(), "two words");
    let child = std::process::Command::new("env").output().unwrap();
    assert!(String::from_utf8_lossy(&child.stdout).contains("KIT_B=two words\n"));
}

#[test]
fn an_array_that_a_reader_walks_stays_as_it_was() {
    let _turn = turn();
    let mut held = Vec::new();
    for number in 0..64 {
        held.push((array(), entries(array())));
        let name = format!("KIT_WALK_{number}");
        assert_eq!(add(&[(&name, "1")]), [&name]);
    }
    for (array, before) in &held {
        assert_eq!(&entries(*array), before);
    }
    let mut arrays: Vec<_> = held.iter().map(|(array, _)| *array).collect();
    arrays.dedup();
    assert_eq!(arrays.len(), held.len());
}

#[test]
fn readers_in_c_find_every_variable_while_others_are_added() {
    let _turn = turn();
    add(&[("KIT_LAST", "here")]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(read(c"KIT_LAST").as_deref(), Some("here"));
                }
            });
        }
        for number in 0..2000 {
            add(&[(&format!("KIT_MANY_{number}"), "1")]);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(read(c"KIT_MANY_1999").as_deref(), Some("1"));
}

#[test]
fn libc_goes_on_from_what_was_added() {
    let _turn = turn();
    add(&[("KIT_OURS", "1")]);
    // SAFETY: no other thread of this program changes the environment, and none that reads it holds an array of libc's.
    unsafe {
        std::env::set_var("KIT_LIBC", "2");
        std::env::remove_var("KIT_OURS");
    }
    assert_eq!(add(&[("KIT_OURS", "3"), ("KIT_LIBC", "4")]), ["KIT_OURS"]);
    assert_eq!([c"KIT_OURS", c"KIT_LIBC"].map(read), ["3", "2"].map(|value| Some(value.to_owned())));
}
