//! Translates rules from the notation of GBNF, which llama.cpp, xgrammar and SGLang's `ebnf` share, to Lark's.
//!
//! ```text
//! root   ::= "yes" | number ("," number)*      start: r_root
//! number ::= [0-9]{1,3}                        r_root: "yes" | r_number ("," r_number)*
//! ```
//!
//! It reads texts, character classes with their escapes, `.`, groups, `* + ?`, `{m,n}` and comments.

use std::collections::HashSet;
use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

use crate::source::quoted;
use crate::{GrammarError, MAX_TEXT, Source};

/// Whether a text is written in this notation.
#[must_use]
pub fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// Translates rules to Lark's notation.
///
/// # Errors
/// When the text is not in this notation, or has no rule `root`.
pub fn source(text: &str) -> Result<Source, GrammarError> {
    if text.len() > MAX_TEXT {
        let reason = format!("the grammar has {} bytes; at most {MAX_TEXT} are taken", text.len());
        return Err(GrammarError::Refused(reason));
    }
    let failed = |reason| GrammarError::Compile { kind: "EBNF grammar", reason };
    let tokens = tokens(text).map_err(failed)?;
    let lark = rules(&tokens).map_err(failed)?;
    Ok(Source::lark(lark))
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    Defined,
    /// An element in Lark's notation: a text, a class, a group's border, a repetition.
    Piece(String),
}

fn rules(tokens: &[Token]) -> Result<String, String> {
    let mut lark = String::from("start: r_root\n");
    let mut defined: HashSet<&str> = HashSet::new();
    let mut used: Vec<&str> = Vec::new();
    let mut rest = tokens.iter().enumerate().peekable();
    while let Some((at, token)) = rest.next() {
        let begins = matches!(tokens.get(at + 1), Some(Token::Defined));
        match token {
            Token::Name(name) if begins => {
                if !defined.insert(name.as_str()) {
                    return Err(format!("the rule {name} is defined twice"));
                }
                rest.next();
                let empty = match rest.peek() {
                    None => true,
                    Some((next, token)) => {
                        matches!(token, Token::Name(_))
                            && matches!(tokens.get(next + 1), Some(Token::Defined))
                    }
                };
                let body = if empty { " \"\"" } else { "" };
                let line = if at == 0 { "" } else { "\n" };
                write!(lark, "{line}{}:{body}", lark_name(name)).map_err(|error| error.to_string())?;
            }
            Token::Name(name) => {
                used.push(name);
                lark.push(' ');
                lark.push_str(&lark_name(name));
            }
            Token::Defined => return Err("::= must come after the name of a rule".to_owned()),
            Token::Piece(_) if defined.is_empty() => {
                return Err("it must begin with the name of a rule and ::=".to_owned());
            }
            Token::Piece(piece) => {
                // A repetition follows its item without a space.
                if !piece.starts_with(['*', '+', '?', '{']) {
                    lark.push(' ');
                }
                lark.push_str(piece);
            }
        }
    }
    if !defined.contains("root") {
        return Err("it has no rule named root, at which an answer begins".to_owned());
    }
    match used.into_iter().find(|name| !defined.contains(*name)) {
        Some(name) => Err(format!("the rule {name} is used and not defined")),
        None => Ok(lark),
    }
}

/// The name of a rule in Lark, where such names are lower case. Upper-case letters, `_` and `-` are written as their numbers.
fn lark_name(name: &str) -> String {
    let letter = |letter: char| match letter {
        'a'..='z' | '0'..='9' => letter.to_string(),
        other => format!("_{:x}_", u32::from(other)),
    };
    format!("r_{}", name.chars().map(letter).collect::<String>())
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        match letter {
            '#' => while rest.next_if(|letter| *letter != '\n').is_some() {},
            letter if letter.is_whitespace() => {}
            ':' => {
                if !(rest.next() == Some(':') && rest.next() == Some('=')) {
                    return Err("a colon begins ::= and nothing else".to_owned());
                }
                tokens.push(Token::Defined);
            }
            '"' => tokens.push(Token::Piece(quoted(&text_of(&mut rest)?))),
            '[' => tokens.push(Token::Piece(class(&mut rest)?)),
            '.' => tokens.push(Token::Piece("/(?s:.)/".to_owned())),
            '(' | ')' | '|' | '*' | '+' | '?' => tokens.push(Token::Piece(letter.to_string())),
            '{' => {
                let mut bounds = String::new();
                loop {
                    match rest.next() {
                        Some('}') => break,
                        Some(' ') => {}
                        Some(digit) if digit.is_ascii_digit() || digit == ',' => bounds.push(digit),
                        _ => return Err("a repetition must be {m}, {m,} or {m,n}".to_owned()),
                    }
                }
                tokens.push(Token::Piece(format!("{{{bounds}}}")));
            }
            letter if is_name(letter) => {
                let mut name = letter.to_string();
                while let Some(letter) = rest.next_if(|letter| is_name(*letter)) {
                    name.push(letter);
                }
                tokens.push(Token::Name(name));
            }
            other => return Err(format!("{other:?} has no meaning here")),
        }
    }
    Ok(tokens)
}

fn is_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == '-'
}

fn text_of(rest: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut text = String::new();
    loop {
        match rest.next().ok_or("a text has no end")? {
            '"' => return Ok(text),
            '\\' => text.push(escape(rest)?),
            letter => text.push(letter),
        }
    }
}

/// A character class as a regular expression, with each character written as its number.
fn class(rest: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut class = String::from("/[");
    if rest.next_if_eq(&'^').is_some() {
        class.push('^');
    }
    let mut empty = true;
    loop {
        let letter = match rest.next().ok_or("a character class has no end")? {
            ']' if empty => return Err("a character class is empty".to_owned()),
            ']' => break,
            // A hyphen between two characters means a range. A hyphen at either end is a character.
            '-' if !empty && rest.peek().is_some_and(|next| *next != ']') => {
                class.push('-');
                continue;
            }
            '\\' => escape(rest)?,
            letter => letter,
        };
        empty = false;
        write!(class, "\\u{{{:x}}}", u32::from(letter)).map_err(|error| error.to_string())?;
    }
    class.push_str("]/");
    Ok(class)
}

fn escape(rest: &mut Peekable<Chars<'_>>) -> Result<char, String> {
    let number = |digits: usize, rest: &mut Peekable<Chars<'_>>| {
        let digits: String = rest.by_ref().take(digits).collect();
        let number = u32::from_str_radix(&digits, 16).ok();
        number.and_then(char::from_u32).ok_or_else(|| format!("{digits:?} is no number of a character"))
    };
    Ok(match rest.next().ok_or("a text ends within an escape")? {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'x' => number(2, rest)?,
        'u' => number(4, rest)?,
        'U' => number(8, rest)?,
        letter if letter.is_ascii_alphanumeric() => return Err(format!("\\{letter} is no escape")),
        letter => letter,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_larks() {
        let text = "# numbers\nroot ::= \"a\\\"b\" | some-Rule{2,3} (\n  [^a-z\\]/-]+ . )? empty\nsome-Rule ::= \"\\n\"\nempty ::=\n";
        let lark = source(text).unwrap().text;
        assert_eq!(
            lark,
            "start: r_root\nr_root: \"a\\\"b\" | r_some_2d__52_ule{2,3} ( /[^\\u{61}-\\u{7a}\\u{5d}\\u{2f}\\u{2d}]/+ /(?s:.)/ )? r_empty\
             \nr_some_2d__52_ule: \"\\n\"\nr_empty: \"\""
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, words) in [
            ("x ::= \"a\"", "no rule named root"),
            ("root ::= y", "y is used and not defined"),
            ("root ::= \"a\" root ::= \"b\"", "defined twice"),
            ("\"a\" ::= b", "must begin with the name"),
            ("root ::= \"a", "no end"),
            ("root ::= []", "empty"),
            ("root ::= \"a\"{x}", "{m,n}"),
            ("root : \"a\"", "colon"),
            ("root ::= %", "no meaning"),
            ("root ::= \"\\q\"", "no escape"),
        ] {
            let error = source(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
