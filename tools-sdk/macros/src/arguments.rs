//! Reading the arguments of an attribute and the doc comment under it.

use proc_macro2::{Span, TokenStream};
use syn::parse::{ParseStream, Parser};
use syn::{
    Attribute, Error, Expr, ExprArray, ExprLit, Ident, Lit, LitInt, LitStr, Meta, Path, Result, Token,
};

/// The arguments of either attribute.
#[derive(Default)]
pub(crate) struct Arguments {
    pub(crate) name: Option<LitStr>,
    pub(crate) effect: Option<LitStr>,
    pub(crate) wants: Vec<LitStr>,
    pub(crate) text: Option<Path>,
    pub(crate) expected_ms: Option<LitInt>,
    pub(crate) expected_seconds_of: Option<LitStr>,
}

impl Arguments {
    /// Reads `key = value, ...`; keys that are not in `allowed` are refused with the list of those that are.
    pub(crate) fn parse(tokens: TokenStream, allowed: &[&str]) -> Result<Self> {
        let parser = |input: ParseStream<'_>| {
            let mut arguments = Self::default();
            while !input.is_empty() {
                let key: Ident = input.parse()?;
                if !allowed.iter().any(|name| key == name) {
                    let message = format!("unknown argument `{key}`; there are: {}", allowed.join(", "));
                    return Err(Error::new(key.span(), message));
                }
                input.parse::<Token![=]>()?;
                match key.to_string().as_str() {
                    "name" => arguments.name = Some(input.parse()?),
                    "effect" => arguments.effect = Some(input.parse()?),
                    "text" => arguments.text = Some(input.parse()?),
                    "expected_ms" => arguments.expected_ms = Some(input.parse()?),
                    "expected_seconds_of" => arguments.expected_seconds_of = Some(input.parse()?),
                    _ => arguments.wants = strings(&input.parse()?)?,
                }
                if !input.is_empty() {
                    input.parse::<Token![,]>()?;
                }
            }
            Ok(arguments)
        };
        parser.parse2(tokens)
    }
}

fn strings(array: &ExprArray) -> Result<Vec<LitStr>> {
    array
        .elems
        .iter()
        .map(|element| match element {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Ok(text.clone()),
            other => Err(Error::new_spanned(other, "expected a string")),
        })
        .collect()
}

/// The doc comment as one text: lines are joined, an empty line starts a new paragraph.
pub(crate) fn description(attributes: &[Attribute], what: &str) -> Result<String> {
    let mut text = String::new();
    for attribute in attributes {
        let Meta::NameValue(pair) = &attribute.meta else { continue };
        let Expr::Lit(ExprLit { lit: Lit::Str(line), .. }) = &pair.value else { continue };
        if !pair.path.is_ident("doc") {
            continue;
        }
        let line = line.value();
        let line = line.trim();
        if line.is_empty() {
            text.push_str("\n\n");
        } else {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push(' ');
            }
            text.push_str(line);
        }
    }
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::new(
            Span::call_site(),
            format!("{what} needs a doc comment: it is what the model is told"),
        ));
    }
    Ok(text.to_owned())
}

/// Checks a name that goes into prompts, URLs and function-call formats.
pub(crate) fn check_name(name: &str, span: Span) -> Result<()> {
    let fits = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if fits { Ok(()) } else { Err(Error::new(span, "a name has 1 to 64 of the characters a-z A-Z 0-9 _ -")) }
}
