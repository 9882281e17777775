//! The modules of a crate, and which module names which.
//!
//! Paths in code are found, also in bodies of macros. They are followed through `use` and `pub use` of the modules on their way.
//! Three things are not found: methods of a value whose type is not named, macros that are visible by their place in the text,
//! and modules whose file `#[path]` names. A name that a module may have from `use other::*` counts as a name of `other`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::code::Code;

/// Segments of a path. The path of a module begins at the crate's root, which has the empty path.
type Segments = Vec<String>;

/// For each module, the modules that it names.
pub type Arrows = BTreeMap<String, BTreeSet<String>>;

#[derive(Debug, Default, PartialEq, Eq)]
struct Import {
    path: Segments,
    name: String,
    all: bool,
}

#[derive(Debug, Default)]
struct Module {
    /// Paths that its code names, with those of its imports.
    paths: Vec<Segments>,
    imports: Vec<Import>,
}

/// The modules of a crate that are not for tests alone.
#[derive(Debug, Default)]
pub struct Modules(BTreeMap<Segments, Module>);

impl Modules {
    /// Reads a crate from its root, `lib.rs` or `main.rs`.
    pub fn read(root: &Path) -> Self {
        let mut modules = Self::default();
        let folder = root.parent().unwrap().to_owned();
        modules.add(Vec::new(), Code::read(root).tokens, &mut |module| {
            let mut file: PathBuf = folder.clone();
            file.extend(module);
            Code::read(&file.with_extension("rs")).tokens
        });
        modules
    }

    fn add(&mut self, path: Segments, code: TokenStream, file: &mut dyn FnMut(&[String]) -> TokenStream) {
        let tokens: Vec<TokenTree> = code.into_iter().collect();
        let (mut own, mut at) = (Vec::new(), 0);
        while at < tokens.len() {
            let child = match &tokens[at..] {
                [TokenTree::Ident(keyword), TokenTree::Ident(name), rest, ..] if keyword == "mod" => {
                    Some((name.to_string(), rest))
                }
                _ => None,
            };
            let Some((name, rest)) = child else {
                own.push(tokens[at].clone());
                at += 1;
                continue;
            };
            let child: Segments = path.iter().cloned().chain([name]).collect();
            at += 3;
            let code = match rest {
                TokenTree::Group(group) => group.stream(),
                _ if own.iter().rev().take(2).any(names_a_file) => continue,
                _ => file(&child),
            };
            self.add(child, code, file);
        }
        let mut module = Module::default();
        module.scan(&own);
        self.0.insert(path, module);
    }

    /// The number of modules, with the crate's root.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// For each module with children, the arrows between these.
    ///
    /// A module may name the modules around it and inside it. Any other name is an arrow between two siblings: the one that holds
    /// the naming module, and the one that holds the named module.
    pub fn arrows(&self) -> BTreeMap<String, Arrows> {
        let mut found: BTreeMap<String, Arrows> = BTreeMap::new();
        for (module, inside) in &self.0 {
            let mut named = BTreeSet::new();
            for path in &inside.paths {
                self.follow(module, path, &mut named, 0);
            }
            for name in named {
                let common = module.iter().zip(&name).take_while(|(one, other)| one == other).count();
                if let (Some(from), Some(to)) = (module.get(common), name.get(common)) {
                    let arrows = found.entry(module[..common].join("::")).or_default();
                    arrows.entry(from.clone()).or_default().insert(to.clone());
                }
            }
        }
        found
    }

    fn child(&self, module: &[String], name: &str) -> Option<Segments> {
        let child: Segments = module.iter().cloned().chain([name.to_owned()]).collect();
        self.0.contains_key(&child).then_some(child)
    }

    /// Follows a path as the code of `module` writes it, and adds the modules on its way to `named`.
    fn follow(&self, module: &[String], path: &[String], named: &mut BTreeSet<Segments>, depth: usize) {
        // Stops at names that refer to each other, as the names of a crate and of a module may.
        if depth > 8 {
            return;
        }
        let mut at = module.to_vec();
        for (index, name) in path.iter().enumerate() {
            match name.as_str() {
                "crate" if index == 0 => at.clear(),
                "self" => {}
                "super" => {
                    at.pop();
                }
                name => {
                    if let Some(child) = self.child(&at, name) {
                        at = child;
                    } else {
                        // The path ends here, except where an import continues it. An import does not continue its own path.
                        for import in self.0[&at].imports.iter().filter(|import| import.path != path) {
                            let rest = match import {
                                Import { all: true, .. } => &path[index..],
                                Import { name: brought, .. } if brought == name => &path[index + 1..],
                                _ => continue,
                            };
                            let onward: Segments = import.path.iter().chain(rest).cloned().collect();
                            self.follow(&at, &onward, named, depth + 1);
                        }
                        return;
                    }
                }
            }
            named.insert(at.clone());
        }
    }
}

impl Module {
    fn scan(&mut self, tokens: &[TokenTree]) {
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.scan(&group.stream().into_iter().collect::<Vec<_>>());
                    at += 1;
                }
                // Not `use<'a>` of a type.
                TokenTree::Ident(word) if word == "use" && !is_punct(tokens.get(at + 1), '<') => {
                    let end = tokens[at..].iter().position(|token| is_punct(Some(token), ';'));
                    let end = end.map_or(tokens.len(), |length| at + length);
                    let known = self.imports.len();
                    imports(&tokens[at + 1..end], &[], &mut self.imports);
                    self.paths.extend(self.imports[known..].iter().map(|import| import.path.clone()));
                    at = end;
                }
                TokenTree::Ident(word) => {
                    // A path begins here, unless the word continues a longer path or names a field. After `..` it is the end of a
                    // range.
                    let before =
                        |back: usize, wanted| is_punct(at.checked_sub(back).map(|at| &tokens[at]), wanted);
                    let begins = (!before(1, '.') || before(2, '.')) && !(before(1, ':') && before(2, ':'));
                    let mut path = vec![plain(word)];
                    at += 1;
                    while let [one, two, TokenTree::Ident(next), ..] = &tokens[at..] {
                        if !is_punct(Some(one), ':') || !is_punct(Some(two), ':') {
                            break;
                        }
                        path.push(plain(next));
                        at += 3;
                    }
                    if begins {
                        self.paths.push(path);
                    }
                }
                _ => at += 1,
            }
        }
    }
}

/// Whether the token is the inside of a `#[path = "…"]`.
fn names_a_file(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else { return false };
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Bracket && matches!(first, Some(TokenTree::Ident(word)) if word == "path")
}

fn plain(word: &proc_macro2::Ident) -> String {
    word.to_string().trim_start_matches("r#").to_owned()
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

/// The imports of a `use`, with its braces expanded.
fn imports(tree: &[TokenTree], before: &[String], found: &mut Vec<Import>) {
    for part in tree.split(|token| is_punct(Some(token), ',')) {
        let (mut path, mut renamed, mut all, mut group) = (before.to_vec(), None, false, false);
        // A path that begins with `::` names a crate.
        if before.is_empty() && is_punct(part.first(), ':') {
            continue;
        }
        for (at, token) in part.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    renamed = part.get(at + 1).map(ToString::to_string);
                    break;
                }
                TokenTree::Ident(word) => path.push(plain(word)),
                TokenTree::Punct(punct) if punct.as_char() == '*' => all = true,
                TokenTree::Group(inner) if inner.delimiter() == Delimiter::Brace => {
                    imports(&inner.stream().into_iter().collect::<Vec<_>>(), &path, found);
                    group = true;
                }
                _ => {}
            }
        }
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        if group || path.is_empty() {
            continue;
        }
        let name = renamed.or_else(|| path.last().cloned()).filter(|_| !all).unwrap_or_default();
        found.push(Import { path, name, all });
    }
}

/// A circle of arrows, if there is one: its modules in order, the first one again at the end.
pub fn circle(arrows: &Arrows) -> Option<Vec<String>> {
    let mut left = arrows.clone();
    // A module that names no other lies on no circle.
    loop {
        let before = left.len();
        let there: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|_, named| {
            named.retain(|name| there.contains(name));
            !named.is_empty()
        });
        if left.len() == before {
            break;
        }
    }
    let mut way = vec![left.keys().next()?.clone()];
    loop {
        let next = left[way.last()?].first()?.clone();
        if let Some(at) = way.iter().position(|module| *module == next) {
            way.push(next);
            return Some(way.split_off(at));
        }
        way.push(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arrows of made-up files, by their names without `.rs`, as `parent: from -> to`.
    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let code = |name: &str| {
            let (_, text) = files.iter().find(|(file, _)| *file == name).unwrap();
            Code::new((*text).to_owned()).unwrap().tokens
        };
        let mut modules = Modules::default();
        modules.add(Vec::new(), code("lib"), &mut |module| code(&module.join("/")));
        assert_eq!(modules.count(), files.len(), "{modules:?}");
        let arrows = modules.arrows();
        let flat = arrows.iter().flat_map(|(parent, arrows)| {
            arrows
                .iter()
                .flat_map(move |(from, to)| to.iter().map(move |to| format!("{parent}: {from} -> {to}")))
        });
        flat.collect()
    }

    #[test]
    fn siblings_that_are_named_are_arrows() {
        for named in [
            "use crate::b::B;",
            "use crate::{b::{self, B}, c};",
            "use super::b as other;",
            "fn f() { crate::b::g(); }",
            "fn f() { 0..crate::b::MOST; }",
            "fn f() { assert!(matches!(x, super::b::B { .. })); }",
            "macro_rules! m { () => { $crate::b::g() }; }",
            "impl crate::b::B for C {}",
        ] {
            let found = arrows(&[
                ("lib", "mod a; mod b; struct S;"),
                ("a", named),
                ("b", "use crate::S; use super::S;"),
            ]);
            assert_eq!(found, [": a -> b"], "{named}");
        }
        for other in [
            "// crate::b::B",
            "const S: &str = \"crate::b\";",
            "use ::b::B;",
            "use b::B;",
            "fn f() { x.b(); other::b::c(); }",
            "#[cfg(test)] mod tests { use crate::b::B; }",
        ] {
            let found = arrows(&[("lib", "mod a; mod b;"), ("a", other), ("b", "")]);
            assert!(found.is_empty(), "{other}: {found:?}");
        }
    }

    #[test]
    fn names_are_followed_through_what_the_root_and_parents_bring_in() {
        for root in [
            "mod a; mod b; pub use b::B;",
            "mod a; mod b; pub(crate) use crate::b::B;",
            "mod a; mod b; use self::b::{C, Other as B};",
            "mod a; mod b; pub use b::*;",
        ] {
            for named in ["use crate::B;", "fn f(_: &super::B) {}", "use super::*; struct S(B);"] {
                let found = arrows(&[("lib", root), ("a", named), ("b", "")]);
                assert_eq!(found, [": a -> b"], "{root} {named}");
            }
        }
        let found = arrows(&[
            ("lib", "mod a; mod b; pub use b::c::C as D;"),
            ("a", "use crate::D;"),
            ("b", "pub mod c; pub mod d; use std::fs;"),
            ("b/c", "use super::fs; use super::d::E;"),
            ("b/d", "use crate::D;"),
        ]);
        assert_eq!(found, [": a -> b", "b: c -> d", "b: d -> c"]);
    }

    #[test]
    fn another_crate_of_a_modules_name_is_not_that_module() {
        let found = arrows(&[("lib", "mod a; mod b; pub use ::b::B;"), ("a", "use crate::B;"), ("b", "")]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn names_that_mean_each_other_end() {
        let found = arrows(&[
            ("lib", "mod a; use a::b::c; use other::other;"),
            ("a", "use crate::c as b; use other; fn f() { other::x::y(); b::c(); }"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn modules_without_a_file_and_nested_ones_have_arrows_of_their_own() {
        let found = arrows(&[
            ("lib", "mod a;"),
            ("a", "mod b; mod d; fn f() { b::g(); } "),
            ("a/b", "use super::d::D; use super::f;"),
            ("a/d", ""),
        ]);
        assert_eq!(found, ["a: b -> d"]);
        let mut modules = Modules::default();
        let code =
            Code::new("mod a { mod c { use super::super::b; } } mod b { use crate::a::c::D; }".to_owned());
        modules.add(Vec::new(), code.unwrap().tokens, &mut |module| panic!("{module:?}"));
        assert_eq!(circle(&modules.arrows()[""]), Some(["a", "b", "a"].map(str::to_owned).to_vec()));
    }

    fn graph(arrows: &[(&str, &[&str])]) -> Arrows {
        arrows
            .iter()
            .map(|(from, to)| ((*from).to_owned(), to.iter().map(|to| (*to).to_owned()).collect()))
            .collect()
    }

    #[test]
    fn a_circle_is_found_wherever_it_lies() {
        let found = circle(&graph(&[
            ("a", &["b"]),
            ("b", &["c", "z"]),
            ("c", &["d"]),
            ("d", &["b"]),
            ("e", &["a", "b"]),
        ]));
        assert_eq!(found, Some(["b", "c", "d", "b"].map(str::to_owned).to_vec()));
        assert_eq!(circle(&graph(&[("a", &["b"]), ("b", &["a"])])).map(|way| way.len()), Some(3));
    }

    #[test]
    fn arrows_that_only_point_down_are_no_circle() {
        assert_eq!(circle(&graph(&[("a", &["b", "c", "d"]), ("b", &["d"]), ("c", &["b", "d"])])), None);
        assert_eq!(circle(&graph(&[])), None);
    }
}
