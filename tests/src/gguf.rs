//! Writes GGUF files, valid or invalid: nothing is checked, and every number of the header can be set.

mod retyped;

pub use retyped::retyped;

/// Numbers of the types of values.
#[allow(missing_docs, reason = "the format's own types, by their names")]
pub mod value {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A GGUF file in the making.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// Version of the format.
    pub version: u32,
    /// Alignment of data. No key is written for it.
    pub alignment: usize,
    /// Number of keys that the header claims, if not the real one.
    pub claimed_keys: Option<u64>,
    /// Number of tensors that the header claims, if not the real one.
    pub claimed_tensors: Option<u64>,
    /// Keys as they are written: name, type, value.
    pub keys: Vec<(String, Vec<u8>)>,
    /// The tensors of the file.
    pub tensors: Vec<GgufTensor>,
}

/// A tensor in the making.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Sizes in ggml's order: the elements of a row first.
    pub dimensions: Vec<u64>,
    /// The number of its type.
    pub kind: u32,
    /// The offset that the header claims, if not the end of the tensor before.
    pub offset: Option<u64>,
    /// Its elements, as they are stored.
    pub data: Vec<u8>,
}

impl Default for GgufFile {
    fn default() -> Self {
        let (keys, tensors) = (Vec::new(), Vec::new());
        Self { version: 3, alignment: 32, claimed_keys: None, claimed_tensors: None, keys, tensors }
    }
}

impl GgufFile {
    /// Sets a key to a value that is encoded already, in place of the one that it had.
    pub fn raw(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.remove(key);
        self.append(key, kind, value)
    }

    /// Writes a key to a value that is encoded already, even if the key is there.
    pub fn append(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.keys.push((key.to_owned(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(name, _)| name != key);
        self
    }

    /// Sets a key to a text.
    pub fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.raw(key, value::TEXT, &text(value.as_bytes()))
    }

    /// Sets a key to a `u32`.
    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, value::U32, &value.to_le_bytes())
    }

    /// Sets a key to an `f32`.
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, value::F32, &value.to_le_bytes())
    }

    /// Sets a key to a bool.
    pub fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.raw(key, value::BOOL, &[u8::from(value)])
    }

    /// Sets a key to an array of texts.
    pub fn texts<'a>(&mut self, key: &str, values: impl IntoIterator<Item = &'a str>) -> &mut Self {
        self.array(key, value::TEXT, values.into_iter().map(|value| text(value.as_bytes())))
    }

    /// Sets a key to an array of `i32`.
    pub fn integers(&mut self, key: &str, values: &[i32]) -> &mut Self {
        self.array(key, value::I32, values.iter().map(|value| value.to_le_bytes()))
    }

    /// Sets a key to an array of `f32`.
    pub fn numbers(&mut self, key: &str, values: &[f32]) -> &mut Self {
        self.array(key, value::F32, values.iter().map(|value| value.to_le_bytes()))
    }

    /// Sets a key to an array of values that are encoded already.
    pub fn array<T: AsRef<[u8]>>(
        &mut self,
        key: &str,
        kind: u32,
        values: impl IntoIterator<Item = T>,
    ) -> &mut Self {
        let mut bytes = Vec::new();
        let mut count = 0u64;
        for value in values {
            bytes.extend_from_slice(value.as_ref());
            count += 1;
        }
        let head = [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
        self.raw(key, value::ARRAY, &[head, bytes].concat())
    }

    /// Adds a tensor.
    pub fn tensor(&mut self, name: &str, dimensions: &[u64], kind: u32, data: Vec<u8>) -> &mut Self {
        let (name, dimensions) = (name.to_owned(), dimensions.to_vec());
        self.tensors.push(GgufTensor { name, dimensions, kind, offset: None, data });
        self
    }

    /// The bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.claimed_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        file.extend(self.claimed_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (name, value) in &self.keys {
            file.extend(text(name.as_bytes()));
            file.extend(value);
        }
        let mut end = 0u64;
        for tensor in &self.tensors {
            file.extend(text(tensor.name.as_bytes()));
            file.extend((tensor.dimensions.len() as u32).to_le_bytes());
            file.extend(tensor.dimensions.iter().flat_map(|size| size.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(end).to_le_bytes());
            end = (end + tensor.data.len() as u64).next_multiple_of(self.alignment as u64);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&tensor.data);
        }
        file
    }
}

/// A text as it is written: its length, then its bytes.
#[must_use]
pub fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}
