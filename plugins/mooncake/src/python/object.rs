//! Python's values, and calls with them.

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};

use super::api::{Api, Handle, c_name, text};

/// Python's lock, held by this thread.
pub struct Gil {
    api: &'static Api,
    state: c_int,
    /// It belongs to its thread.
    _thread: std::marker::PhantomData<*mut ()>,
}

/// A reference to a value of Python's. Any thread may drop it, which takes the lock.
pub struct Object {
    api: &'static Api,
    pointer: NonNull<std::ffi::c_void>,
}

// SAFETY: the pointer is only used under Python's lock.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

/// An argument of a call.
#[derive(Clone, Copy)]
pub enum Value<'a> {
    /// A text.
    Text(&'a str),
    /// A size or an address.
    Unsigned(u64),
    /// True or false.
    Bool(bool),
    /// A list of sizes or addresses.
    Numbers(&'a [u64]),
    /// A list of texts.
    Texts(&'a [&'a str]),
    /// A value that Python gave.
    Object(&'a Object),
}

impl Gil {
    pub(super) fn hold(api: &'static Api) -> Self {
        // SAFETY: Python is initialised before an `Api` is handed out, and never ends. Any thread may take its lock.
        let state = unsafe { (api.PyGILState_Ensure)() };
        Self { api, state, _thread: std::marker::PhantomData }
    }

    /// Imports a module.
    ///
    /// # Errors
    /// The exception's text.
    pub fn import(&self, module: &str) -> Result<Object, String> {
        // SAFETY: we hold the lock, and the name ends in a zero.
        self.owned(unsafe { (self.api.PyImport_ImportModule)(c_name(module).as_ptr()) })
    }

    /// An attribute: a method bound to its object, a class of a module.
    ///
    /// # Errors
    /// The exception's text.
    pub fn attribute(&self, of: &Object, name: &str) -> Result<Object, String> {
        // SAFETY: we hold the lock. The object is alive, and the name ends in a zero.
        self.owned(unsafe { (self.api.PyObject_GetAttrString)(of.pointer.as_ptr(), c_name(name).as_ptr()) })
    }

    /// Calls a value.
    ///
    /// # Errors
    /// The exception's text.
    pub fn call(&self, callee: &Object, arguments: &[Value]) -> Result<Object, String> {
        let tuple = self.tuple(arguments)?;
        // SAFETY: we hold the lock, and both are alive.
        self.owned(unsafe { (self.api.PyObject_CallObject)(callee.pointer.as_ptr(), tuple.pointer.as_ptr()) })
    }

    /// Reads a whole number.
    ///
    /// # Errors
    /// When the value is no whole number, or too large.
    pub fn int(&self, object: &Object) -> Result<i64, String> {
        // SAFETY: we hold the lock, and the object is alive.
        let value = unsafe { (self.api.PyLong_AsLongLong)(object.pointer.as_ptr()) };
        if value == -1 && self.has_raised() { Err(self.raised()) } else { Ok(value) }
    }

    /// Reads a whole number that is not negative, such as the address that stands for a batch.
    ///
    /// # Errors
    /// When the value is no such number, or too large.
    pub fn unsigned(&self, object: &Object) -> Result<u64, String> {
        // SAFETY: we hold the lock, and the object is alive.
        let value = unsafe { (self.api.PyLong_AsUnsignedLongLong)(object.pointer.as_ptr()) };
        if value == u64::MAX && self.has_raised() { Err(self.raised()) } else { Ok(value) }
    }

    /// Reads a text.
    ///
    /// # Errors
    /// When the value is no text.
    pub fn text(&self, object: &Object) -> Result<String, String> {
        let mut length = 0;
        // SAFETY: we hold the lock. The object is alive, and the text lives as long as it.
        unsafe {
            let start = (self.api.PyUnicode_AsUTF8AndSize)(object.pointer.as_ptr(), &raw mut length);
            if start.is_null() {
                return Err(self.raised());
            }
            let bytes = std::slice::from_raw_parts(start.cast::<u8>(), usize::try_from(length).unwrap_or(0));
            Ok(String::from_utf8_lossy(bytes).into_owned())
        }
    }

    /// Reads the members of a list.
    ///
    /// # Errors
    /// When the value is no list.
    pub fn items(&self, list: &Object) -> Result<Vec<Object>, String> {
        // SAFETY: we hold the lock, and the object is alive.
        let size = unsafe { (self.api.PySequence_Size)(list.pointer.as_ptr()) };
        if size < 0 {
            return Err(self.raised());
        }
        // SAFETY: as above. What it returns is a reference of ours.
        let item = |at| self.owned(unsafe { (self.api.PySequence_GetItem)(list.pointer.as_ptr(), at) });
        (0..size).map(item).collect()
    }

    fn tuple(&self, arguments: &[Value]) -> Result<Object, String> {
        // SAFETY: we hold the lock.
        let tuple = self.owned(unsafe { (self.api.PyTuple_New)(arguments.len() as isize) })?;
        for (at, argument) in arguments.iter().enumerate() {
            let value = self.raw(*argument);
            if value.is_null() {
                return Err(self.raised());
            }
            // SAFETY: we hold the lock. The place is inside the new tuple, which takes our reference over.
            unsafe { (self.api.PyTuple_SetItem)(tuple.pointer.as_ptr(), at as isize, value) };
        }
        Ok(tuple)
    }

    /// A new reference to a value, or null when Python raised.
    fn raw(&self, value: Value) -> Handle {
        let api = self.api;
        // SAFETY: we hold the lock. Texts are given with their lengths.
        unsafe {
            match value {
                Value::Text(text) => {
                    (api.PyUnicode_FromStringAndSize)(text.as_ptr().cast(), text.len() as isize)
                }
                Value::Unsigned(number) => (api.PyLong_FromUnsignedLongLong)(number),
                Value::Bool(value) => (api.PyBool_FromLong)(value.into()),
                Value::Numbers(numbers) => {
                    self.list(numbers.iter().map(|number| Value::Unsigned(*number)), numbers.len())
                }
                Value::Texts(texts) => self.list(texts.iter().map(|text| Value::Text(text)), texts.len()),
                Value::Object(object) => {
                    (api.Py_IncRef)(object.pointer.as_ptr());
                    object.pointer.as_ptr()
                }
            }
        }
    }

    fn list<'a>(&self, values: impl Iterator<Item = Value<'a>>, count: usize) -> Handle {
        // SAFETY: we hold the lock.
        let list = unsafe { (self.api.PyList_New)(count as isize) };
        if list.is_null() {
            return list;
        }
        for (at, value) in values.enumerate() {
            let value = self.raw(value);
            if value.is_null() {
                // SAFETY: we hold the lock, and the list is ours.
                unsafe { (self.api.Py_DecRef)(list) };
                return null_mut();
            }
            // SAFETY: we hold the lock. The place is inside the new list, which takes our reference over.
            unsafe { (self.api.PyList_SetItem)(list, at as isize, value) };
        }
        list
    }

    fn owned(&self, pointer: Handle) -> Result<Object, String> {
        let pointer = NonNull::new(pointer).ok_or_else(|| self.raised())?;
        Ok(Object { api: self.api, pointer })
    }

    fn has_raised(&self) -> bool {
        // SAFETY: we hold the lock.
        !unsafe { (self.api.PyErr_Occurred)() }.is_null()
    }

    /// Takes the text of the exception that was raised, and clears the exception.
    fn raised(&self) -> String {
        let (mut kind, mut value, mut trace) = (null_mut(), null_mut(), null_mut());
        // SAFETY: we hold the lock. What is fetched are references of ours, or null.
        let [kind, value, _trace] = unsafe {
            (self.api.PyErr_Fetch)(&raw mut kind, &raw mut value, &raw mut trace);
            (self.api.PyErr_NormalizeException)(&raw mut kind, &raw mut value, &raw mut trace);
            [kind, value, trace].map(|p| NonNull::new(p).map(|pointer| Object { api: self.api, pointer }))
        };
        let Some(value) = value else { return "a call into Python failed without an exception".to_owned() };
        // SAFETY: we hold the lock, and the object is alive. Null when even that raises.
        let said = NonNull::new(unsafe { (self.api.PyObject_Str)(value.pointer.as_ptr()) })
            .map(|pointer| Object { api: self.api, pointer });
        let said = said.and_then(|said| self.plain(&said)).unwrap_or_default();
        let name = kind.and_then(|kind| {
            // SAFETY: as above.
            let name =
                unsafe { (self.api.PyObject_GetAttrString)(kind.pointer.as_ptr(), c"__name__".as_ptr()) };
            self.plain(&Object { api: self.api, pointer: NonNull::new(name)? })
        });
        // SAFETY: we hold the lock. Exceptions that were raised while the text was made are dropped.
        unsafe { (self.api.PyErr_Clear)() };
        format!("{}: {said}", name.as_deref().unwrap_or("an exception"))
    }

    /// The value's text, or `None` without a reason when it is no text.
    fn plain(&self, object: &Object) -> Option<String> {
        // SAFETY: we hold the lock. The object is alive, and the text lives as long as it.
        unsafe {
            let start = (self.api.PyUnicode_AsUTF8AndSize)(object.pointer.as_ptr(), null_mut());
            (!start.is_null()).then(|| text(start))
        }
    }
}

impl Drop for Gil {
    fn drop(&mut self) {
        // SAFETY: it was taken by this thread, which it cannot leave, and is given back once.
        unsafe { (self.api.PyGILState_Release)(self.state) };
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let _gil = Gil::hold(self.api);
        // SAFETY: we hold the lock, and the reference is ours.
        unsafe { (self.api.Py_DecRef)(self.pointer.as_ptr()) };
    }
}

impl Clone for Object {
    fn clone(&self) -> Self {
        let _gil = Gil::hold(self.api);
        // SAFETY: we hold the lock, and the object is alive.
        unsafe { (self.api.Py_IncRef)(self.pointer.as_ptr()) };
        Self { api: self.api, pointer: self.pointer }
    }
}
