//! `#[tool]`: from a function to an implementation of `tools_sdk::tool::Tool`.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{Error, FnArg, ItemFn, Result, ReturnType, Type};

use crate::arguments::{Arguments, check_name, description};

const ARGUMENTS: [&str; 6] = ["name", "effect", "wants", "text", "expected_ms", "expected_seconds_of"];

pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let arguments = Arguments::parse(arguments, &ARGUMENTS)?;
    let function: ItemFn = syn::parse2(item)?;
    let ident = &function.sig.ident;
    let visibility = &function.vis;
    let name = arguments.name.as_ref().map_or_else(|| ident.to_string(), syn::LitStr::value);
    check_name(&name, arguments.name.as_ref().map_or(ident.span(), syn::LitStr::span))?;
    let description = description(&function.attrs, "a tool")?;
    let effect = effect(&arguments, &function)?;
    let wants = &arguments.wants;
    let input = input_type(&function)?;
    let output = output_type(&function)?;
    let text = arguments.text.as_ref().map(|path| {
        quote! {
            fn text(output: &Self::Output) -> ::core::option::Option<::std::string::String> {
                ::core::option::Option::Some(#path(output))
            }
        }
    });
    let expected_ms = expected_ms(&arguments)?;
    let expected_seconds_of = option(arguments.expected_seconds_of.as_ref());
    Ok(quote! {
        #function

        #[doc = "The tool of this name, for tests."]
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug)]
        #visibility enum #ident {}

        impl ::tools_sdk::tool::Tool for #ident {
            type Input = #input;
            type Output = <#output as ::tools_sdk::tool::Outcome>::Output;
            const NAME: &'static str = #name;
            const DESCRIPTION: &'static str = #description;
            const EFFECT: ::tools_sdk::tool::Effect = #effect;
            const WANTS: &'static [&'static str] = &[#(#wants),*];
            const EXPECTED_MS: ::core::option::Option<u64> = #expected_ms;
            const EXPECTED_SECONDS_OF: ::core::option::Option<&'static str> = #expected_seconds_of;

            fn call(
                input: Self::Input,
                context: &::tools_sdk::tool::Context,
            ) -> ::core::result::Result<Self::Output, ::tools_sdk::Error> {
                #ident(input, context)
            }

            #text
        }

        ::tools_sdk::export_tool!(#ident);
    })
}

fn effect(arguments: &Arguments, function: &ItemFn) -> Result<TokenStream> {
    let choices = "`effect = \"pure\"`, `\"read\"`, `\"idempotent\"` or `\"effect\"`";
    let Some(effect) = &arguments.effect else {
        let message = format!("say what a call may change: {choices}");
        return Err(Error::new(function.sig.ident.span(), message));
    };
    Ok(match effect.value().as_str() {
        "pure" => quote!(::tools_sdk::tool::Effect::Pure),
        "read" => quote!(::tools_sdk::tool::Effect::Read),
        "idempotent" => quote!(::tools_sdk::tool::Effect::Idempotent),
        "effect" => quote!(::tools_sdk::tool::Effect::Effect),
        _ => return Err(Error::new(effect.span(), format!("an effect is {choices}"))),
    })
}

/// The milliseconds of `expected_ms`, as an expression.
fn expected_ms(arguments: &Arguments) -> Result<TokenStream> {
    let milliseconds = arguments.expected_ms.as_ref().map(syn::LitInt::base10_parse::<u64>).transpose()?;
    Ok(option(milliseconds.as_ref()))
}

fn option<T: ToTokens>(value: Option<&T>) -> TokenStream {
    match value {
        Some(value) => quote!(::core::option::Option::Some(#value)),
        None => quote!(::core::option::Option::None),
    }
}

fn input_type(function: &ItemFn) -> Result<&Type> {
    let inputs = &function.sig.inputs;
    match (inputs.len(), inputs.first()) {
        (2, Some(FnArg::Typed(input))) => Ok(&input.ty),
        _ => Err(Error::new_spanned(
            &function.sig,
            "a tool is `fn(input: In, context: &Context) -> Result<Out, ToolError>`",
        )),
    }
}

fn output_type(function: &ItemFn) -> Result<&Type> {
    match &function.sig.output {
        ReturnType::Type(_, output) => Ok(output),
        ReturnType::Default => {
            Err(Error::new_spanned(&function.sig, "a tool returns `Result<Out, ToolError>`"))
        }
    }
}
