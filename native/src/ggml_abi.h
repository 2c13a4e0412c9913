// The interface structs of ggml's backend API, version 2 (ggml 0.25.3), which ggml keeps in a header that it does not install. Members must
// match ggml's in order and type: tests/test_abi.py compiles this file against the original. Only backend.cpp includes it.
#pragma once

#include "ggml-backend.h"

#define EDGEMOE_GGML_API_VERSION 2
#define EDGEMOE_GGML_VERSION     "0.25.3"

struct ggml_backend_buffer_type_i {
    const char *          (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t                (*get_alignment)(ggml_backend_buffer_type_t);
    size_t                (*get_max_size)(ggml_backend_buffer_type_t);
    size_t                (*get_alloc_size)(ggml_backend_buffer_type_t, const struct ggml_tensor *);
    bool                  (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    struct ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t                device;
    void *                            context;
};

struct ggml_backend_buffer_i {
    void             (*free_buffer)(ggml_backend_buffer_t);
    void *           (*get_base)(ggml_backend_buffer_t);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t, struct ggml_tensor *);
    void             (*memset_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t, size_t, size_t);
    void             (*set_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t);
    void             (*get_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t);
    void             (*set_tensor_2d)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void             (*get_tensor_2d)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool             (*cpy_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, struct ggml_tensor *);
    void             (*clear)(ggml_backend_buffer_t, uint8_t);
    void             (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    struct ggml_backend_buffer_i   iface;
    ggml_backend_buffer_type_t     buft;
    void *                         context;
    size_t                         size;
    enum ggml_backend_buffer_usage usage;
};

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t);
    void         (*free)(ggml_backend_t);
    void         (*set_tensor_async)(ggml_backend_t, struct ggml_tensor *, const void *, size_t, size_t);
    void         (*get_tensor_async)(ggml_backend_t, const struct ggml_tensor *, void *, size_t, size_t);
    void         (*set_tensor_2d_async)(ggml_backend_t, struct ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void         (*get_tensor_2d_async)(ggml_backend_t, const struct ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool         (*cpy_tensor_async)(ggml_backend_t, ggml_backend_t, const struct ggml_tensor *, struct ggml_tensor *);
    void         (*synchronize)(ggml_backend_t);
    ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t, const struct ggml_cgraph *);
    void             (*graph_plan_free)(ggml_backend_t, ggml_backend_graph_plan_t);
    void             (*graph_plan_update)(ggml_backend_t, ggml_backend_graph_plan_t, const struct ggml_cgraph *);
    enum ggml_status (*graph_plan_compute)(ggml_backend_t, ggml_backend_graph_plan_t);
    enum ggml_status (*graph_compute)(ggml_backend_t, struct ggml_cgraph *);
    void             (*event_record)(ggml_backend_t, ggml_backend_event_t);
    void             (*event_wait)(ggml_backend_t, ggml_backend_event_t);
    void             (*graph_optimize)(ggml_backend_t, struct ggml_cgraph *, struct ggml_backend_graph_optimize_params *);
};

struct ggml_backend {
    ggml_guid_t           guid;
    struct ggml_backend_i iface;
    ggml_backend_dev_t    device;
    void *                context;
};

struct ggml_backend_device_i {
    const char *               (*get_name)(ggml_backend_dev_t);
    const char *               (*get_description)(ggml_backend_dev_t);
    void                       (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void                       (*get_props)(ggml_backend_dev_t, struct ggml_backend_dev_props *);
    ggml_backend_t             (*init_backend)(ggml_backend_dev_t, const char *);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
    ggml_backend_buffer_t      (*buffer_from_host_ptr)(ggml_backend_dev_t, void *, size_t, size_t);
    bool                       (*supports_op)(ggml_backend_dev_t, const struct ggml_tensor *);
    bool                       (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    bool                       (*offload_op)(ggml_backend_dev_t, const struct ggml_tensor *);
    ggml_backend_event_t       (*event_new)(ggml_backend_dev_t);
    void                       (*event_free)(ggml_backend_dev_t, ggml_backend_event_t);
    void                       (*event_synchronize)(ggml_backend_dev_t, ggml_backend_event_t);
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t           reg;
    void *                       context;
};

struct ggml_backend_reg_i {
    const char *       (*get_name)(ggml_backend_reg_t);
    size_t             (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
    void *             (*get_proc_address)(ggml_backend_reg_t, const char *);
};

struct ggml_backend_reg {
    int                       api_version;
    struct ggml_backend_reg_i iface;
    void *                    context;
};
