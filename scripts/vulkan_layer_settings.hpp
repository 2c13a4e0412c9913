// What ggml-vulkan.cpp takes from VK_EXT_layer_settings, for Vulkan headers older than 1.3.272 (Debian 12 has 1.3.239):
// their vulkan.hpp does not know that extension. `scripts/setup.sh --vulkan` force-includes this file then.
//
// ggml chains one such structure to vkCreateInstance, whether or not it asks for validation. Loaders and drivers walk that
// chain and skip what they do not know by its type, so type, order and size of the members have to be Vulkan's own.
// No Vulkan header is included: every C++ file of llama.cpp gets this one, and only ggml-vulkan's know where those are.
#pragma once

#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : int32_t {
    eBool32 = 0,
};

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    int32_t                 sType = 1000496000;  // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;  // the vector's own: it has to outlive this structure

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}
};

}  // namespace vk
