// A defect of the fakes in C++: an exception that leaves a method.
#ifndef THROWING_HPP
#define THROWING_HPP

#include <new>
#include <stdexcept>
#include <string>

#include "host_plugin.hpp"

// Throws what the key `throws` says in the method that the key `in` names.
class Throwing {
public:
    explicit Throwing(const host::Opening &opening) : what_(opening.string("throws")), in_(opening.string("in")) {
        if (!what_.empty() && what_ != "runtime_error" && what_ != "bad_alloc" && what_ != "int") {
            throw host::Error(HOST_CONFIG, "throws is \"" + what_ + "\", it must be runtime_error, bad_alloc or int");
        }
    }

    void at(const char *method) const {
        if (what_.empty() || in_ != method) {
            return;
        }
        if (what_ == "runtime_error") {
            throw std::runtime_error(std::string("told to throw in ") + method);
        }
        if (what_ == "bad_alloc") {
            throw std::bad_alloc();
        }
        throw 7;
    }

private:
    std::string what_;
    std::string in_;
};

#endif
