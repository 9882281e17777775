//! Source text as the compiler sees it: without comments, and without the items that only tests are built with.

use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, Group, Spacing, TokenStream, TokenTree};

/// A file of source code.
pub struct Code {
    /// Its tokens, without documentation and without items that are built for tests alone.
    pub tokens: TokenStream,
    text: String,
}

impl Code {
    /// Reads a file.
    pub fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self::new(text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Cuts a text into tokens.
    pub fn new(text: String) -> Result<Self, proc_macro2::LexError> {
        let tokens = without_tests(text.parse::<TokenStream>()?, &text);
        Ok(Self { tokens, text })
    }

    /// The lines that hold code, with their numbers. Everything else on them is blank.
    pub fn lines(&self) -> Vec<(usize, String)> {
        let mut shown: Vec<u8> =
            self.text.bytes().map(|byte| if byte == b'\n' { byte } else { b' ' }).collect();
        show(&self.tokens, self.text.as_bytes(), &mut shown);
        let shown = String::from_utf8(shown).unwrap();
        let lines = shown.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        lines.map(|(index, line)| (index + 1, line.trim_end().to_owned())).collect()
    }
}

/// Whether a file is built for tests alone: one of the modules around it is declared for them.
pub fn belongs_to_tests(path: &Path) -> bool {
    let mut module = path.with_extension("");
    while let (Some(name), Some(folder)) = (module.file_name(), module.parent()) {
        let name = name.to_string_lossy().into_owned();
        if name == "tests" {
            return true;
        }
        let is_top = folder.file_name().is_some_and(|name| name == "src");
        let parents = if is_top {
            vec![folder.join("lib.rs"), folder.join("main.rs")]
        } else {
            vec![folder.with_extension("rs")]
        };
        let parents: Vec<Code> =
            parents.iter().filter(|path| path.exists()).map(|path| Code::read(path)).collect();
        let without_tests = parents.iter().any(|code| declares(&code.tokens, &name));
        if !without_tests && parents.iter().any(|code| declares(&code.text.parse().unwrap(), &name)) {
            return true;
        }
        if is_top {
            return false;
        }
        module = folder.to_owned();
    }
    false
}

/// Whether the tokens have a `mod name;`.
fn declares(tokens: &TokenStream, name: &str) -> bool {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let here = tokens.windows(3).any(|three| {
        is_word(three.first(), &["mod"]) && is_word(three.get(1), &[name]) && is_punct(three.get(2), ';')
    });
    here || tokens.iter().any(|token| match token {
        TokenTree::Group(group) => declares(&group.stream(), name),
        _ => false,
    })
}

fn show(tokens: &TokenStream, text: &[u8], shown: &mut [u8]) {
    for token in tokens.clone() {
        let mut copy = |range: std::ops::Range<usize>| {
            shown[range.clone()].copy_from_slice(&text[range]);
        };
        match token {
            TokenTree::Group(group) => {
                copy(group.span_open().byte_range());
                copy(group.span_close().byte_range());
                show(&group.stream(), text, shown);
            }
            token => copy(token.span().byte_range()),
        }
    }
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn is_group(token: Option<&TokenTree>, wanted: Delimiter) -> bool {
    matches!(token, Some(TokenTree::Group(group)) if group.delimiter() == wanted)
}

fn is_word(token: Option<&TokenTree>, wanted: &[&str]) -> bool {
    matches!(token, Some(TokenTree::Ident(word)) if wanted.iter().any(|name| word == name))
}

/// The attribute at the beginning of tokens: the number of its tokens, and whether it belongs to the enclosing item.
fn attribute(tokens: &[TokenTree]) -> Option<(usize, bool)> {
    let inner = is_punct(tokens.get(1), '!');
    let length = 2 + usize::from(inner);
    let is = is_punct(tokens.first(), '#') && is_group(tokens.get(length - 1), Delimiter::Bracket);
    is.then_some((length, inner))
}

/// Whether an attribute is `cfg(test)`, or `cfg(all(test, …))`.
fn is_for_tests(attribute: &[TokenTree]) -> bool {
    let Some(TokenTree::Group(brackets)) = attribute.last() else { return false };
    let inside: Vec<TokenTree> = brackets.stream().into_iter().collect();
    is_word(inside.first(), &["cfg"]) && inside.get(1).is_some_and(needs_test)
}

fn needs_test(condition: &TokenTree) -> bool {
    let TokenTree::Group(condition) = condition else { return false };
    let inside: Vec<TokenTree> = condition.stream().into_iter().collect();
    let mut conditions = inside.split(|token| is_punct(Some(token), ','));
    conditions.any(|condition| match condition {
        [word] => is_word(Some(word), &["test"]),
        [all, conditions] => is_word(Some(all), &["all"]) && needs_test(conditions),
        _ => false,
    })
}

/// The number of tokens of the item, statement, field or variant at the beginning.
fn item(tokens: &[TokenTree]) -> usize {
    let mut begin = 0;
    while let Some((length, _)) = attribute(&tokens[begin..]) {
        begin += length;
    }
    if is_word(tokens.get(begin), &["pub"]) {
        begin += 1 + usize::from(is_group(tokens.get(begin + 1), Delimiter::Parenthesis));
    }
    let function = is_word(tokens.get(begin + 1), &["fn", "unsafe", "async", "extern"]);
    let to_semicolon = is_word(tokens.get(begin), &["use", "let", "static", "type"])
        || (is_word(tokens.get(begin), &["const"]) && !function);
    let declares = is_word(
        tokens.get(begin),
        &[
            "fn",
            "mod",
            "impl",
            "struct",
            "enum",
            "union",
            "trait",
            "unsafe",
            "async",
            "extern",
            "const",
            "macro_rules",
        ],
    );
    let field = is_punct(tokens.get(begin + 1), ':') && !is_punct(tokens.get(begin + 2), ':');
    let (mut angles, mut joined) = (0_usize, false);
    for (at, token) in tokens.iter().enumerate().skip(begin) {
        let ends = match token {
            TokenTree::Group(group) => !to_semicolon && group.delimiter() == Delimiter::Brace,
            TokenTree::Punct(punct) => {
                match punct.as_char() {
                    '<' if field => angles += 1,
                    // Not the `>` of an arrow.
                    '>' if field && !joined => angles = angles.saturating_sub(1),
                    _ => {}
                }
                joined = punct.spacing() == Spacing::Joint && "-=".contains(punct.as_char());
                punct.as_char() == ';'
                    || (punct.as_char() == ',' && !to_semicolon && !declares && angles == 0)
            }
            _ => false,
        };
        if ends {
            return at + 1;
        }
    }
    tokens.len()
}

fn without_tests(tokens: TokenStream, text: &str) -> TokenStream {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let (mut kept, mut at): (Vec<TokenTree>, usize) = (Vec::new(), 0);
    // Where in `kept` the attributes of the current item begin.
    let mut attributes = 0;
    while at < tokens.len() {
        let Some((length, inner)) = attribute(&tokens[at..]) else {
            attributes = kept.len() + 1;
            match &tokens[at] {
                TokenTree::Group(group) => {
                    let mut cut = Group::new(group.delimiter(), without_tests(group.stream(), text));
                    cut.set_span(group.span());
                    kept.push(cut.into());
                }
                token => kept.push(token.clone()),
            }
            at += 1;
            continue;
        };
        let written = &tokens[at..at + length];
        if is_for_tests(written) {
            if inner {
                return TokenStream::new();
            }
            kept.truncate(attributes);
            at += item(&tokens[at..]);
            attributes = kept.len();
            continue;
        }
        // The parser turns documentation into attributes.
        if !text[written[0].span().byte_range()].starts_with('/') {
            kept.extend(written.iter().cloned());
        }
        if inner {
            attributes = kept.len();
        }
        at += length;
    }
    kept.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<(usize, String)> {
        Code::new(text.to_owned()).unwrap().lines()
    }

    #[test]
    fn files_of_tests_are_known_by_how_they_are_declared() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join("src").join(name);
        fs::create_dir_all(at("a")).unwrap();
        fs::write(at("lib.rs"), "mod a; #[cfg(test)] mod b;").unwrap();
        fs::write(at("a.rs"), "mod c; #[cfg(test)] mod d; #[cfg(test)] mod e { }").unwrap();
        let of_tests = ["b.rs", "b/f.rs", "a/d.rs", "a/d/f.rs", "a/tests.rs", "a/tests/f.rs"];
        assert!(of_tests.iter().all(|name| belongs_to_tests(&at(name))));
        let others = ["lib.rs", "a.rs", "a/c.rs", "a/c/f.rs"];
        assert!(!others.iter().any(|name| belongs_to_tests(&at(name))));
    }

    fn words(text: &str) -> String {
        let lines: Vec<String> = shown(text).into_iter().map(|(_, line)| line).collect();
        lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn only_the_item_behind_the_attribute_is_left_out() {
        for (cut, left) in [
            ("use a::{b, c};", ""),
            ("pub(super) use a::b;", ""),
            ("mod tests;", ""),
            ("mod tests { fn f() { g(\"}\", '}', \"\\\"}\"); /* } */ } // }\n }", ""),
            ("#[allow(dead_code)]\nfn f<A, B>(a: A, b: B) -> [u8; 4] { if a { b } else { c } }", ""),
            ("pub(crate) const fn f() {}", ""),
            ("const MOST: [u8; 2] = { [1, 2] };", ""),
            ("static S: T = T { a: 1, b: 2 };", ""),
            ("impl<A, B> Of<A, B> for C {}", ""),
            ("struct S(u8, u8);", ""),
            ("macro_rules! m { () => {}; }", ""),
        ] {
            let text = format!("mod a;\n#[cfg(test)]\n{cut}\nmod z;\n");
            assert_eq!(words(&text), format!("mod a; {left}mod z;"), "{cut}");
        }
    }

    #[test]
    fn statements_fields_and_variants_are_items_too() {
        assert_eq!(words("fn f() { a(); #[cfg(test)] note(1, { 2 }); b() }"), "fn f() { a(); b() }");
        assert_eq!(words("fn f() { #[cfg(test)] let a = { 1 }; b() }"), "fn f() { b() }");
        assert_eq!(words("fn f() { #[cfg(test)] { a(); } b() }"), "fn f() { b() }");
        assert_eq!(
            words("struct S { a: A, #[cfg(test)] b: Map<u8, fn(A) -> B>, c: C }"),
            "struct S { a: A, c: C }"
        );
        assert_eq!(words("enum E { A, #[cfg(test)] B(u8, u8), C }"), "enum E { A, C }");
        assert_eq!(words("enum E { A, #[cfg(test)] B }"), "enum E { A, }");
        assert_eq!(words("use a; #[cfg(test)] fn f();"), "use a;");
    }

    #[test]
    fn what_stands_before_the_attribute_goes_with_the_item() {
        assert_eq!(
            words("#![no_std] #[inline] #[cfg(test)] #[cold] fn f() {} fn g() {}"),
            "#![no_std] fn g() {}"
        );
        assert_eq!(
            words("fn a() {} /// Of tests.\n #[cfg(test)] mod tests; #[cold] fn g() {}"),
            "fn a() {} #[cold] fn g() {}"
        );
    }

    #[test]
    fn what_also_stands_without_tests_stays() {
        for text in [
            "#[cfg(any(test, fuzzing))] fn f() {}",
            "#[cfg(not(test))] fn f() {}",
            "#[cfg(all(unix, not(test)))] fn f() {}",
            "#[cfg(feature = \"test\")] fn f() {}",
            "const A: &str = \"#[cfg(test)] mod tests;\"; fn f() {}",
        ] {
            assert_eq!(words(text), text);
        }
        assert_eq!(words("// #[cfg(test)]\nfn f() {}"), "fn f() {}");
        assert_eq!(words("#[cfg(all(test, not(loom)))] fn f() {} fn g() {}"), "fn g() {}");
        assert_eq!(words("#![cfg(test)] fn f() {} fn g() {}"), "");
    }

    #[test]
    fn lines_keep_their_numbers_and_lose_their_comments() {
        let text = "//! A page.\n\n/// A function, of \"é\".\nfn f() {\n    \"é // no comment\" // one\n}\n/* more\n */ fn g() {}\n";
        let expected = [(4, "fn f() {"), (5, "    \"é // no comment\""), (6, "}"), (8, "    fn g() {}")];
        assert_eq!(shown(text), expected.map(|(line, text)| (line, text.to_owned())));
    }
}
